#pragma once
#include "ptx/math.cuh"
namespace flashmla::ptx {

inline float e4m3_value(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  if ((code & 0x7f) == 0x7f) value = NAN;
  return code & 0x80 ? -value : value;
}
inline uint32_t cvt_rn_f16x2_e4m3x2(uint16_t codes) {
  return fp16_bits(e4m3_value(codes & 0xff)) | fp16_bits(e4m3_value(codes >> 8)) << 16;
}

}  // namespace flashmla::ptx
