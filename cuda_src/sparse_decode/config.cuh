// Compile-time shape of the FP8 sparse decode kernel on sm_90a.
#pragma once
#include "attention/split.cuh"
#include "common/kv_format.cuh"
#include "common/types.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

template <int kTiles, int kStages>
struct alignas(1024) SharedStorage {
  static constexpr int kTileElements = tile::kTileBytes / 2;
  bf16_t q[kTiles][kTileElements];
  bf16_t k[kStages][kTiles][kTileElements];  // 64 tokens x 64 dims a tile; tiles 0-7 are also V
  bf16_t p[kTileElements];                   // 64 rows x 64 tokens
  float rescale[64];                         // per row: factor for the accumulated output before this block is added
  float inv_sum[64];                         // per row: 1 / row sum (and the sink), valid with the last block
  uint16_t valid[kStages][4];                // a bit a token: its index is one of the cache
  uint64_t k_full[kStages][2], k_empty[kStages][2];  // by halves: dims 0-255, the others
  uint64_t p_full, p_empty;
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

  static constexpr int kThreads = 384;  // scores and output half 0, output half 1, dequantize
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = kCrossover ? 2 : 1;
  static constexpr int kTokensOfACta = kBlock / kClusterX;  // that it dequantizes of a block
  static constexpr int kScoreRegisters = kPaged ? 216 : 208;
  static constexpr int kOutputRegisters = 160, kDequantRegisters = 3 * 168 - kOutputRegisters - kScoreRegisters;

  using Storage = SharedStorage<kTiles, kStages>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
};

}  // namespace flashmla::sparse_decode
