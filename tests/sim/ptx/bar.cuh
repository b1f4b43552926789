#pragma once
namespace flashmla::ptx {

inline void bar_sync(uint32_t id, uint32_t threads) { sim::cta().named[id].arrive(threads, true); }
inline void bar_arrive(uint32_t id, uint32_t threads) { sim::cta().named[id].arrive(threads, false); }

}  // namespace flashmla::ptx
