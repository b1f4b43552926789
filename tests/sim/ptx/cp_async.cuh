#pragma once
namespace flashmla::ptx {

inline void cp_async_16(uint32_t destination, const void* source, uint32_t bytes) {
  if (destination % 16 || (uintptr_t)source % 16) sim::die("misaligned 16-byte copy");
  memset(sim::at(destination), 0, 16);
  if (bytes) memcpy(sim::at(destination), source, bytes);
}
inline void cp_async_wait_all() {}

}  // namespace flashmla::ptx
