#pragma once
namespace flashmla::ptx {

inline void bar_sync(uint32_t id, uint32_t threads) {
  if (threads != 128) sim::die("named barriers are of 128 threads here");
  sim::cta().named[id].wait();
}

}  // namespace flashmla::ptx
