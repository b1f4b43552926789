// Reads a paged FP8 cache back as bf16 or float. flashmla_cupy/reference/kv_quant.py is bit-identical.
//
// grid    ceil(tokens / 8)
// block   8 warps, one token each: lane l holds chunks l, l + 32, ... of 8 values. All loads of a token are in flight
//         before the first is used.
// PDL     everything is read and written after griddepcontrol.wait
#pragma once
#include "kv_quant/config.cuh"
#include "kv_quant/token.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/e4m3.cuh"

namespace flashmla::kv_quant {

// a * b as float, or, where float cannot hold it, the neighbour whose last bit is 1: rounding that to bf16 gives what
// rounding the exact product once would (Boldo and Melquiond, round to odd).
__device__ __forceinline__ float multiply_to_odd(float a, float b) {
  const float down = __fmul_rd(a, b), up = __fmul_ru(a, b);
  return __float_as_uint(down) & 1 ? down : up;
}

__device__ __forceinline__ void store(bf16_t* dst, const float (&x)[8]) { *reinterpret_cast<uint4*>(dst) = narrow(x); }
__device__ __forceinline__ void store(float* dst, const float (&x)[8]) {
  reinterpret_cast<float4*>(dst)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(dst)[1] = make_float4(x[4], x[5], x[6], x[7]);
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

  uint4 raw[Config::kPasses];  // 8 codes in x and y and a scale in z, or 8 bf16
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; pass++) {
    const int chunk = 32 * pass + lane;
    if (chunk < Config::kNopeChunks) {
      const uint2 codes = *reinterpret_cast<const uint2*>(token.row + chunk * Config::kChunk);
      const int tile = chunk / Config::kTileLanes;
      uint32_t scale;
      if constexpr (Format::kUe8m0) {
        scale = token.scales[tile];
      } else {
        scale = reinterpret_cast<const uint32_t*>(token.scales)[tile];
      }
      raw[pass] = make_uint4(codes.x, codes.y, scale, 0);
    } else if (chunk < Config::kChunks) {
      raw[pass] = reinterpret_cast<const uint4*>(token.row + Format::kRopeOffset)[chunk - Config::kNopeChunks];
    }
  }

#pragma unroll
  for (int pass = 0; pass < Config::kPasses; pass++) {
    const int chunk = 32 * pass + lane;
    Element* dst = token.kv + chunk * Config::kChunk;
    float x[8];
    if (chunk < Config::kNopeChunks) {
      const float scale = Format::kUe8m0 ? kv_format::ue8m0_value((uint8_t)raw[pass].z) : __uint_as_float(raw[pass].z);
      tile::decode_e4m3x4(raw[pass].x, x);
      tile::decode_e4m3x4(raw[pass].y, x + 4);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if constexpr (sizeof(Element) == 2 && !Format::kUe8m0) {
          x[i] = multiply_to_odd(x[i], scale);
        } else {  // rounded once: by this product (float), or not here (a power of two)
          x[i] = __fmul_rn(x[i], scale);
        }
      }
      store(dst, x);
    } else if (chunk < Config::kChunks) {
      if constexpr (sizeof(Element) == 2) {
        *reinterpret_cast<uint4*>(dst) = raw[pass];
      } else {
        const uint4 rope[1] = {raw[pass]};
        widen(rope, x);
        store(dst, x);
      }
    }
  }
}

}  // namespace flashmla::kv_quant
