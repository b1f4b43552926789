#pragma once
namespace flashmla::ptx {

inline void st_shared_v4(uint32_t address, uint4 v) {
  if (address % 16) sim::die("misaligned 16-byte store");
  memcpy(sim::at(address), &v, 16);
}
inline uint4 ld_global_nc_v4(const void* address) {
  if ((uintptr_t)address % 16) sim::die("misaligned 16-byte load");
  uint4 v;
  memcpy(&v, address, 16);
  return v;
}

}  // namespace flashmla::ptx
