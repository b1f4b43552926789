#pragma once
namespace flashmla::ptx {

inline void prefetch_l2(const void*) {}

}  // namespace flashmla::ptx
