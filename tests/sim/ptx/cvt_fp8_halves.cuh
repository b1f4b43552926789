#pragma once
#include "ptx/cvt_fp8.cuh"
#include "ptx/wgmma.cuh"
namespace flashmla::ptx {

inline uint32_t cvt_rn_f16x2_e4m3x2_low(uint32_t codes) { return cvt_rn_f16x2_e4m3x2((uint16_t)codes); }
inline uint32_t cvt_rn_f16x2_e4m3x2_high(uint32_t codes) { return cvt_rn_f16x2_e4m3x2((uint16_t)(codes >> 16)); }

// The code nearest to each half, ties to the even one.
inline uint32_t cvt_rn_satfinite_e4m3x4_f16x2(uint32_t halves01, uint32_t halves23) {
  uint32_t codes = 0;
  for (int i = 0; i < 4; i++) {
    const float x = widened<fp16_t>((uint16_t)((i < 2 ? halves01 : halves23) >> i % 2 * 16)), magnitude = fabsf(x);
    uint32_t code = 0x7f;
    if (x == x) {
      code = 0x7e;
      for (uint32_t c = 0x7e; c-- > 0;) {
        const float nearer = fabsf(magnitude - e4m3_value(c)) - fabsf(magnitude - e4m3_value(code));
        if (nearer < 0 || (nearer == 0 && c % 2 == 0)) code = c;
      }
    }
    codes |= (code | (std::signbit(x) ? 0x80 : 0)) << 8 * i;
  }
  return codes;
}

}  // namespace flashmla::ptx
