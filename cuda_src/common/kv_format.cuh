// The two FP8 layouts of the KV cache: flashmla_cupy/kv_format.py describes them, and a unit test holds these numbers
// to it. A page is one run of bytes that begins at a multiple of 16; every offset below keeps codes, scales and RoPE on
// their natural vector boundaries.
#pragma once
#include "common/types.cuh"

namespace flashmla::kv_format {

// kScaleBytes_: of one token's scales, with what is unused. kScalesInRow_: they lie between a token's codes and RoPE,
// else behind the rows of all tokens of the page.
template <int kNope_, int kRope_, int kTile_, int kScaleBytes_, bool kScalesInRow_, bool kUe8m0_>
struct Format {
  static constexpr int kNope = kNope_;    // values of a token kept as e4m3
  static constexpr int kRope = kRope_;    // values of a token kept as bf16
  static constexpr int kQk = kNope + kRope;
  static constexpr int kTile = kTile_;    // values that share a scale
  static constexpr int kTiles = kNope / kTile;
  static constexpr bool kUe8m0 = kUe8m0_; // scales are bytes e for 2^(e - 127), else float32
  static constexpr bool kScalesInRow = kScalesInRow_;
  static constexpr int kScaleBytes = kScaleBytes_;
  static constexpr int kTokenBytes = kNope + 2 * kRope + kScaleBytes;
  static constexpr int kRowBytes = kScalesInRow ? kTokenBytes : kTokenBytes - kScaleBytes;
  static constexpr int kRopeOffset = kRowBytes - 2 * kRope;
  static constexpr int kScaleStride = kScalesInRow ? kRowBytes : kScaleBytes;

  // Bytes from the start of a page to a token's codes and to its scales.
  __device__ __forceinline__ static int64_t row_offset(int32_t slot) { return (int64_t)slot * kRowBytes; }
  __device__ __forceinline__ static int64_t scale_offset(int32_t slot, int32_t page_size) {
    return (kScalesInRow ? (int64_t)kNope : (int64_t)page_size * kRowBytes) + (int64_t)slot * kScaleStride;
  }

  static_assert(kNope % kTile == 0 && kRowBytes % 16 == 0 && kRopeOffset % 16 == 0, "16-byte rows");
};

using V32 = Format<512, 64, 128, 16, true, false>;
using D512 = Format<448, 64, 64, 8, false, true>;

// float32 of a ue8m0 scale: 2^(e - 127), NaN for 255.
__device__ __forceinline__ float ue8m0_value(uint8_t e) {
  return __int_as_float(e == 0 ? 0x00400000 : e == 255 ? 0x7fffffff : (int32_t)e << 23);
}

}  // namespace flashmla::kv_format
