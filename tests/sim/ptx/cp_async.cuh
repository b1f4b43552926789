#pragma once
namespace flashmla::ptx {

template <int kBytes>
inline void cp_async(uint32_t destination, const void* source, uint32_t bytes) {
  if (destination % kBytes || (uintptr_t)source % kBytes) sim::die("misaligned copy");
  memset(sim::at(destination), 0, kBytes);
  if (bytes) memcpy(sim::at(destination), source, bytes);
}
inline void cp_async_16(uint32_t destination, const void* source, uint32_t bytes) { cp_async<16>(destination, source, bytes); }
inline void cp_async_16_of_index(int32_t index, uint32_t destination, const void* source) {
  cp_async<16>(destination, source, index < 0 ? 0 : 16);
}
inline void cp_async_8(uint32_t destination, const void* source, uint32_t bytes) { cp_async<8>(destination, source, bytes); }
inline void cp_async_commit_group() {}
template <int kPending>
inline void cp_async_wait_group() {}
inline void cp_async_wait_all() {}

}  // namespace flashmla::ptx
