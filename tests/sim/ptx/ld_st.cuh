#pragma once
namespace flashmla::ptx {

inline void st_shared_v4(uint32_t address, uint4 v) {
  if (address % 16) sim::die("misaligned 16-byte store");
  memcpy(sim::at(address), &v, 16);
}
inline void st_shared_v2(uint32_t address, uint2 v) {
  if (address % 8) sim::die("misaligned 8-byte store");
  memcpy(sim::at(address), &v, 8);
}
template <class T>
T load(const void* address) {
  if ((uintptr_t)address % sizeof(T)) sim::die("misaligned load");
  T v;
  memcpy(&v, address, sizeof(T));
  return v;
}
inline void st_shared(uint32_t address, uint32_t v) {
  if (address % 4) sim::die("misaligned store");
  memcpy(sim::at(address), &v, 4);
}
inline uint32_t ld_shared(uint32_t address) { return load<uint32_t>(sim::at(address)); }
inline uint2 ld_shared_v2(uint32_t address) { return load<uint2>(sim::at(address)); }
inline uint4 ld_shared_v4(uint32_t address) { return load<uint4>(sim::at(address)); }
inline int32_t ld_global_nc(const int32_t* address) { return load<int32_t>(address); }
inline uint2 ld_global_nc_v2(const void* address) { return load<uint2>(address); }
inline uint4 ld_global_nc_v4(const void* address) { return load<uint4>(address); }

}  // namespace flashmla::ptx
