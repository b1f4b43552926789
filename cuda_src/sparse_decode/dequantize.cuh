// From tokens as they lie in an FP8 cache to rows of bf16 tiles: staged by halves (dims 0-255, the others) in shared memory,
// then converted by a warp.
//
// Order of dims: within each 32, a tile holds them as wgmma's fragments do, position 8 g + 2 c + e for dim 8 c + 2 g + e. What
// a lane of a quad holds of A's columns, and of the output's, is then 8 adjacent dims: Q is loaded into fragments, and the
// output stored from them, by 16 bytes and without shuffles. A score does not mind in which order its dims are summed.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/math.cuh"
#include "ptx/special_register.cuh"
#include "sparse_decode/keys.cuh"
#include "tile/e4m3.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

// Starts the copy of half a token by eight lanes. One that does not exist becomes zeros, for 0 x anything must stay 0.
template <class Format>
__device__ __forceinline__ void copy_token(const TokenAddress& at, uint32_t slot, int half) {
  using Stage = Staging<Format>;
  const int j = ptx::tid_x() % 8;
  const uint32_t bytes = at.row == nullptr ? 0 : 16;
  const uint8_t* src = at.row + (half == 0 ? 0 : Stage::kBegin1) + 16 * j;
  const int row_bytes = half == 0 ? Stage::kRowBytes0 : Stage::kRowBytes1;
#pragma unroll
  for (int first = 0; first < Stage::kRowBytes1; first += 128)
    if (first + 16 * j < row_bytes) ptx::cp_async_16(slot + first + 16 * j, src + first, bytes);
  if constexpr (Format::kScalesInRow) {
    if (half == 0 && j == 7) ptx::cp_async_16(slot + Stage::kScales0, at.row + Format::kNope, bytes);
  } else {
    if (j == 7) ptx::cp_async_8(slot + (half == 0 ? Stage::kScales0 : Stage::kScales1), at.row + at.to_scales, bytes / 2);
  }
}

// The scale of a group of 32 dims of a staged token, whose scales are at `scales`.
template <class Format>
__device__ __forceinline__ float load_scale(uint32_t scales, int group) {
  const int index = group / (Format::kTile / Staging<Format>::kGroup);
  if constexpr (Format::kUe8m0)
    return kv_format::ue8m0_value((uint8_t)(ptx::ld_shared(scales + (index & ~3)) >> (8 * (index & 3))));
  else
    return __uint_as_float(ptx::ld_shared(scales + 4 * index));
}

// Four codes to four bf16 values: exact product with the float32 scale, rounded to float32 and then to bf16.
__device__ __forceinline__ uint2 dequantize4(uint32_t codes, float scale) {
  float x[4];
  tile::decode_e4m3x4(codes, x);
  return make_uint2(ptx::cvt_rn_bf16x2(x[0] * scale, x[1] * scale), ptx::cvt_rn_bf16x2(x[2] * scale, x[3] * scale));
}

// Rows first_token .. first_token + kTokens - 1 of a half's tiles of a stage, by a warp: put(address, 16 bytes). Lane l takes
// token l % kTokens: eight neighbours write to eight different groups of banks.
template <class Format, int kTokens, class Put>
__device__ __forceinline__ void convert_tokens(uint32_t slots, uint32_t tiles, int first_token, int half, Put put) {
  using Stage = Staging<Format>;
  constexpr int kGroupsAtOnce = 32 / kTokens;
  const int lane = ptx::tid_x() % 32, t = lane % kTokens, row = first_token + t;
  const uint32_t slot = slots + (half == 0 ? Stage::kBytes0 : Stage::kBytes1) * t;
  const uint32_t scales = slot + (half == 0 ? Stage::kScales0 : Stage::kScales1);
  const auto put_group = [&](int group, int g, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t dst = tiles + tile::kTileBytes * (group / 2) + tile::swizzle_128b(row, group % 2 * 4);
    put(dst ^ (g << 4), make_uint4(a, b, c, d));
  };
#pragma unroll 1
  for (int first = 0; first < Stage::kGroupsOfHalf0; first += kGroupsAtOnce) {
    const int in_half = first + lane / kTokens, group = Stage::kGroupsOfHalf0 * half + in_half;
    if (Stage::kNopeGroups < 2 * Stage::kGroupsOfHalf0 && group >= Stage::kNopeGroups) continue;
    const uint32_t codes = slot + Stage::kGroup * in_half;
    const uint4 lo = ptx::ld_shared_v4(codes), hi = ptx::ld_shared_v4(codes + 16);
    const float scale = load_scale<Format>(scales, group);
    {
      const uint2 a = dequantize4(lo.x, scale), b = dequantize4(lo.z, scale);
      const uint2 c = dequantize4(hi.x, scale), d = dequantize4(hi.z, scale);
      put_group(group, 0, a.x, b.x, c.x, d.x);
      put_group(group, 1, a.y, b.y, c.y, d.y);
    }
    const uint2 a = dequantize4(lo.y, scale), b = dequantize4(lo.w, scale);
    const uint2 c = dequantize4(hi.y, scale), d = dequantize4(hi.w, scale);
    put_group(group, 2, a.x, b.x, c.x, d.x);
    put_group(group, 3, a.y, b.y, c.y, d.y);
  }
  if (half == 1 && lane / kTokens < Format::kRope / Stage::kGroup) {
    const int group = Stage::kNopeGroups + lane / kTokens;
    const uint32_t rope = slot + Stage::kRope1 + 2 * Stage::kGroup * (lane / kTokens);
    const uint4 a = ptx::ld_shared_v4(rope), b = ptx::ld_shared_v4(rope + 16);
    const uint4 c = ptx::ld_shared_v4(rope + 32), d = ptx::ld_shared_v4(rope + 48);
    put_group(group, 0, a.x, b.x, c.x, d.x);
    put_group(group, 1, a.y, b.y, c.y, d.y);
    put_group(group, 2, a.z, b.z, c.z, d.z);
    put_group(group, 3, a.w, b.w, c.w, d.w);
  }
}

}  // namespace flashmla::sparse_decode
