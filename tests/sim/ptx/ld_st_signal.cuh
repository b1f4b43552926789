#pragma once
#include <thread>
namespace flashmla::ptx {

inline void st_relaxed_cta_shared(uint32_t address, uint32_t v) {
  if (address % 4) sim::die("misaligned store");
  __atomic_store_n(reinterpret_cast<uint32_t*>(sim::at(address)), v, __ATOMIC_RELEASE);
}
inline uint32_t ld_acquire_cta_shared(uint32_t address) {
  if (address % 4) sim::die("misaligned load");
  std::this_thread::yield();  // a loop waits by it
  return __atomic_load_n(reinterpret_cast<uint32_t*>(sim::at(address)), __ATOMIC_ACQUIRE);
}

}  // namespace flashmla::ptx
