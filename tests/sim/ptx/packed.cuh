#pragma once
#include "ptx/math.cuh"
namespace flashmla::ptx {

inline uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) {
  _Float16 x[2], y[2];
  memcpy(x, &a, 4);
  memcpy(y, &b, 4);
  for (int i = 0; i < 2; i++) x[i] = (_Float16)((float)x[i] * (float)y[i]);  // 22 bits hold the product
  memcpy(&a, x, 4);
  return a;
}
inline uint32_t add_rn_f16x2(uint32_t a, uint32_t b) {
  _Float16 x[2], y[2];
  memcpy(x, &a, 4);
  memcpy(y, &b, 4);
  for (int i = 0; i < 2; i++) x[i] = (_Float16)((float)x[i] + (float)y[i]);
  memcpy(&a, x, 4);
  return a;
}
inline uint32_t sub_rn_f16x2(uint32_t a, uint32_t b) {
  _Float16 x[2], y[2];
  memcpy(x, &a, 4);
  memcpy(y, &b, 4);
  for (int i = 0; i < 2; i++) x[i] = (_Float16)((float)x[i] - (float)y[i]);
  memcpy(&a, x, 4);
  return a;
}
inline uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
  return cvt_rn_bf16x2(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                       __uint_as_float(a & 0xffff0000) * __uint_as_float(b & 0xffff0000));
}
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}

}  // namespace flashmla::ptx
