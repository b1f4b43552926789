#pragma once
namespace flashmla::ptx {

inline float ex2_approx_ftz(float x) { return exp2f(x); }
inline int64_t mad_wide_s32(int32_t a, int32_t b, int64_t c) { return (int64_t)a * b + c; }
inline float lg2_approx_ftz(float x) { return log2f(x); }

inline uint32_t bf16_bits(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t fp16_bits(float x) {
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
inline uint32_t cvt_rn_bf16x2(float lo, float hi) { return bf16_bits(lo) | bf16_bits(hi) << 16; }
inline uint32_t cvt_rn_f16x2(float lo, float hi) { return fp16_bits(lo) | fp16_bits(hi) << 16; }

}  // namespace flashmla::ptx
