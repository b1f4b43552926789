// Compile-time shape of the FP8 decode kernel that multiplies codes.
#pragma once
#include "attention/split.cuh"
#include "common/types.cuh"
#include "sparse_decode/config.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

template <class Format>
struct E4m3 {};  // in place of the format: the kernel that multiplies codes

// What a stage tells of its tokens beside their codes; written as the stage is filled.
struct alignas(64) TokenScales {
  float key[4][64];       // tile of 128 dims, token (column_order): the scale
  uint16_t value[4][64];  // tile, token: the same over the token's unit, fp16
  float exponent[64];     // token (column_order): log2 of the unit, the power of two below its largest scale; no token: -inf
  float inverse[64];      // 1 / unit
  float group_exponent[4], group_inverse[4];  // of the unit of 16 tokens; +inf if they have not one in common
};

// What the output warpgroups need with a P.
struct alignas(8) Factors {
  float rescale[64];   // per row: factor for what was accumulated before this block
  float inv_sum[64];   // per row: 1 / row sum (and the sink), valid with the last block of a request
  uint8_t rescales[4]; // whether any of a warp's 16 rows has a factor other than 1
};

constexpr int64_t kNoRow = (int64_t)1 << 63;

template <int kStages>
struct alignas(1024) E4m3Storage {
  uint8_t q[9][tile::kTileBytes];           // of each 128 dims the low and the high codes; the last is RoPE, bf16
  uint8_t k[kStages][5][tile::kTileBytes];  // 64 tokens x 128 codes a tile; the last is RoPE, 64 dims of bf16
  fp16_t p[2][tile::kTileBytes / 2];        // 64 rows x 64 tokens
  TokenScales scales[kStages];
  Factors factors[2];                       // of p
  float q_unit[64];                         // per row: what its codes are multiples of
  float largest[2][4][64];                  // half, warp, row: of the output's magnitudes
  float multiplier[2][64];                  // half, row: of the output
  int64_t out_offset[64];                   // per row, from a request's output: elements; kNoRow if it does not exist
  uint64_t k_full[kStages], k_empty[kStages], p_full[2], p_empty[2];
  attention::PartPlan plan;
};

template <class Format_, bool kPaged_>
struct Config<E4m3<Format_>, kPaged_, false> {
  using Format = Format_;
  static constexpr bool kPaged = kPaged_;  // keys by a block table (dense decode) instead of index lists
  static constexpr bool kCrossover = false;
  static constexpr int kRows = 64;                    // query rows of a CTA
  static constexpr int kBlock = attention::kKvBlock;  // tokens of a block
  static constexpr int kHeadDimV = 512;
  static constexpr int kStages = 3;

  static constexpr int kThreads = 512;  // scores, two output halves, copies
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  // Names of tokens take registers, boxes of them do not: paged, the scores have them and are 1% faster.
  static constexpr int kScoreRegisters = kPaged ? 152 : 144, kOutputRegisters = 168, kCopyRegisters = kPaged ? 24 : 32;
  static_assert(kScoreRegisters + 2 * kOutputRegisters + kCopyRegisters <= 65536 / 128, "registers of an SM");

  using Storage = E4m3Storage<kStages>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
  static_assert(Format::kScalesInRow && !Format::kUe8m0 && Format::kNope == 512 && Format::kTile == 128, "float32 scales of 128");
};

}  // namespace flashmla::sparse_decode
