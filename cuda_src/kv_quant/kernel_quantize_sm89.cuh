// Quantizes tokens into a paged FP8 cache. flashmla_cupy/reference/kv_quant.py states the rules and is bit-identical.
//
// grid    ceil(tokens / 8)
// block   8 warps, one token each: lane l holds chunks l, l + 32, ... of 8 values; the lanes of a tile find its largest
//         magnitude by shuffles. All loads of a token are in flight before the first is used.
// PDL     everything is read and written after griddepcontrol.wait
#pragma once
#include "kv_quant/config.cuh"
#include "kv_quant/token.cuh"
#include "ptx/cvt_fp8.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_st.cuh"

namespace flashmla::kv_quant {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr uint32_t kInfinityBits = 0x7f800000;  // bits of |x| at or above this: Inf or NaN
inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kMinScale = 0x1p-126f;

template <int kLanes>
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(kFullWarp, value, offset));
  return value;
}

// Bits of the largest |x|; with kFiniteOnly that of the finite ones, 0 if there is none. Non-negative floats order as
// their bits do.
template <bool kFiniteOnly>
__device__ __forceinline__ uint32_t largest(const float (&x)[8]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
    if (!kFiniteOnly || magnitude < kInfinityBits) top = max(top, magnitude);
  }
  return top;
}

__device__ __forceinline__ float tile_scale(uint32_t amax, bool power_of_two) {
  if (amax == 0) return 1.0f;
  if (power_of_two) {  // 448 = 1.75 * 2^8
    const int32_t exponent = (int32_t)(amax >> 23) - 8 + ((amax & 0x7fffff) > 0x600000);
    return __int_as_float(max(exponent, 1) << 23);
  }
  return fmaxf(__fdiv_rn(__uint_as_float(amax), kE4m3Max), kMinScale);
}

// x[i] / scale, rounded to nearest. `common`: every x is finite and scale >= 2^-60, so that no step under- or overflows
// where it could change a code.
template <class Element>
__device__ __forceinline__ void divide(float (&x)[8], float scale, bool common) {
  if (sizeof(Element) == 2 && common) {
    // One correction of x * (1 / scale) by the exact remainder. That is the correctly rounded quotient for any bf16 x
    // and any scale made of a bf16 amax: a unit test goes through all their significands. The remainder is
    // q * scale - x, not x - q * scale, so that -0 stays -0.
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float q = __fmul_rn(x[i], reciprocal);
      x[i] = __fmaf_rn(__fmaf_rn(q, scale, -x[i]), -reciprocal, q);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fdiv_rn(x[i], scale);
  }
}

__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d) {
  return (uint32_t)ptx::cvt_rn_satfinite_e4m3x2_f32(a, b) | (uint32_t)ptx::cvt_rn_satfinite_e4m3x2_f32(c, d) << 16;
}

template <class Config>
__device__ __forceinline__ void kernel(const KvQuantParams& params) {
  using Format = typename Config::Format;
  using Element = typename Config::Element;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int64_t index = (int64_t)blockIdx.x * Config::kWarps + threadIdx.x / 32;
  if (index >= params.tokens) return;
  const Token<Config> token(params, (int32_t)index);

  uint4 raw[Config::kPasses][Config::kVectors];
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; pass++) {
    const int chunk = 32 * pass + lane;
    if (chunk < Config::kChunks) {
#pragma unroll
      for (int v = 0; v < Config::kVectors; v++)
        raw[pass][v] = ptx::ld_global_nc_v4(token.kv + chunk * Config::kChunk + v * (16 / sizeof(Element)));
    }
  }

#pragma unroll
  for (int pass = 0; pass < Config::kPasses; pass++) {
    const int chunk = 32 * pass + lane;
    const bool is_nope = chunk < Config::kNopeChunks;
    float x[8];
    widen(raw[pass], x);

    if (32 * pass < Config::kNopeChunks) {  // some lanes hold values to quantize; all of them shuffle
      uint32_t amax = max_of_lanes<Config::kTileLanes>(is_nope ? largest<false>(x) : 0);
      const bool finite = amax < kInfinityBits;
      if (__any_sync(kFullWarp, !finite)) amax = max_of_lanes<Config::kTileLanes>(is_nope ? largest<true>(x) : 0);
      const float scale = tile_scale(amax, Format::kUe8m0 || params.power_of_two_scales);
      if (lane % Config::kTileLanes == 0) {
        const int tile = chunk / Config::kTileLanes;
        if constexpr (Format::kUe8m0) {  // the first RoPE chunk stands for the unused byte
          token.scales[tile] = is_nope ? (uint8_t)(__float_as_uint(scale) >> 23) : 0;
        } else {
          reinterpret_cast<float*>(token.scales)[tile] = scale;
        }
      }
      if (is_nope) {
        divide<Element>(x, scale, finite && scale >= 0x1p-60f);
        *reinterpret_cast<uint2*>(token.row + chunk * Config::kChunk) =
            make_uint2(encode4(x[0], x[1], x[2], x[3]), encode4(x[4], x[5], x[6], x[7]));
      }
    }
    if (!is_nope && chunk < Config::kChunks) {
      uint4* rope = reinterpret_cast<uint4*>(token.row + Format::kRopeOffset) + (chunk - Config::kNopeChunks);
      if constexpr (sizeof(Element) == 2) {
        *rope = raw[pass][0];
      } else {
        *rope = narrow(x);
      }
    }
  }
}

}  // namespace flashmla::kv_quant
