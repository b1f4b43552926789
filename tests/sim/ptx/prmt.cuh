#pragma once
namespace flashmla::ptx {

inline uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selector) {
  const uint64_t bytes = lo | (uint64_t)hi << 32;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= (uint32_t)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

}  // namespace flashmla::ptx
