// Compile-time shape of the FP8 sparse decode kernel on sm_90a.
#pragma once
#include "attention/split.cuh"
#include "attention/token_validity.cuh"
#include "common/kv_format.cuh"
#include "common/types.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

// The bytes of a token that a half of the dims (0-255, the others) needs, as they are staged: a piece of its row, and behind
// it scales that do not lie there. The half is a run-time argument: the warps of both then share their instructions, and the
// loops of all roles fit the instruction cache.
template <class Format>
struct Staging {
  static constexpr int kGroup = 32;       // dims that a lane converts together
  static constexpr int kGroupsOfHalf0 = 8;
  static constexpr int kNopeGroups = Format::kNope / kGroup;
  static constexpr int kBegin1 = kGroupsOfHalf0 * kGroup;  // of half 1, in the row
  static constexpr int kRowBytes0 = kBegin1, kRowBytes1 = Format::kRowBytes - kBegin1;
  static constexpr int kScales0 = kRowBytes0, kScales1 = Format::kScalesInRow ? Format::kNope - kBegin1 : kRowBytes1;
  static constexpr int kRope1 = Format::kRopeOffset - kBegin1;
  static constexpr int kBytes0 = kRowBytes0 + 16, kBytes1 = kRowBytes1 + (Format::kScalesInRow ? 0 : 16);
  // An odd number of 16 bytes, so that eight tokens meet eight different groups of banks.
  static_assert(kBytes0 / 16 % 2 == 1 && kBytes1 / 16 % 2 == 1 && Format::kScaleBytes <= 16, "no bank conflicts");
};

template <int kQTiles, int kTiles, int kStages, int kTokens, int kStagedBytes, bool kScalesInRow>
struct alignas(1024) SharedStorage {
  static constexpr int kTileElements = tile::kTileBytes / 2;
  bf16_t q[kQTiles][kTileElements];          // the tiles of Q that are not register operands
  bf16_t k[kStages][kTiles][kTileElements];  // 64 tokens x 64 dims a tile; tiles 0-7 are also V
  bf16_t p[kTileElements];                   // 64 rows x 64 tokens
  uint8_t staged[kTokens * kStagedBytes];    // half 0, then half 1 of the tokens of a block, as they lie in the cache
  float rescale[64];                         // per row: factor for the accumulated output before this block is added
  float inv_sum[64];                         // per row: 1 / row sum (and the sink), valid with the last block
  attention::TokenValidity valid[kStages];   // whose index is one of the cache
  const uint8_t* row[kTokens / 2];           // where the tokens lie that the output warps dequantize
  int32_t to_scales[kScalesInRow ? 1 : kTokens / 2];
  bool exists;                               // whether there is such a block
  uint64_t k_full[kStages][2], k_empty[kStages][2], names_full, names_empty;
  uint64_t p_full[2], p_empty;
  attention::PartPlan plan;
};

template <class Format_, bool kPaged_, bool kCrossover_>
struct Config {
  using Format = Format_;                   // kv_format::V32 | kv_format::D512
  static constexpr bool kPaged = kPaged_;   // keys by a block table (dense decode) instead of index lists
  // Two CTAs of a cluster, whose rows attend to the same tokens, dequantize half of each block and send it over.
  static constexpr bool kCrossover = kCrossover_;
  static constexpr int kRows = 64;                    // query rows of a CTA
  static constexpr int kBlock = attention::kKvBlock;  // tokens of a block
  static constexpr int kHeadDimV = 512;
  static constexpr int kTiles = Format::kQk / 64;
  static constexpr int kStages = 2;

  static constexpr int kThreads = 512;  // scores, two output halves, dequantize
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = kCrossover ? 2 : 1;
  static constexpr int kTokensOfAWarp = 8 / kClusterX;  // that a warp dequantizes of a block
  // Tiles of Q that are register operands: as many as their warpgroup's registers allow. The crossover leaves room for more
  // in shared memory, and needs the registers elsewhere.
  static constexpr int kQRegTiles = !kCrossover ? 5 : kTiles == 9 ? 3 : 2;
  static constexpr int kScoreRegisters = !kCrossover ? 144 : kTiles == 9 ? 112 : 96;  // of 4 * 128
  static constexpr int kOutputRegisters = kCrossover && kTiles == 8 ? 168 : 160;
  static constexpr int kDequantRegisters = 4 * 128 - kScoreRegisters - 2 * kOutputRegisters;

  using Storage = SharedStorage<kTiles - kQRegTiles, kTiles, kStages, kBlock / kClusterX,
                                Staging<Format>::kBytes0 + Staging<Format>::kBytes1, Format::kScalesInRow>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
};

}  // namespace flashmla::sparse_decode
