// Compile-time shape of the dense decode kernel on sm_90a.
#pragma once
#include "attention/split.cuh"
#include "common/types.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::dense_decode {

// Exactly the 227 KB a CTA may have: 28 tiles of 8 KB (3 stages of the two value halves, 1 of the RoPE tile, the tiles
// of Q that do not live in registers, the probabilities), the one 64 x 16 piece of Q that does not fit the registers
// either, and 1 KB of row factors and barriers.
template <class Element, int kTiles, int kStages>
struct alignas(1024) SharedStorage {
  static constexpr int kTileElements = tile::kTileBytes / (int)sizeof(Element);
  static constexpr int kRopeTiles = kTiles - 8;
  Element k_half[2][kStages][4][kTileElements];  // dims 0-255 | 256-511 of a KV block, 64 tokens x 64 dims a tile
  Element k_rope[kRopeTiles == 0 ? 1 : kRopeTiles][kTileElements];  // dims 512-575; absent (1 spare tile) for d_qk 512
  Element q[kTiles - 7][kTileElements];  // tiles 7 and up of Q
  Element p[kTileElements];              // 64 rows x 64 tokens
  Element q_piece[64 * 16];              // the last 16 dims of tile 6 of Q, 32-byte swizzle
  float rescale[64];         // per row: factor for the accumulated output before this block is added
  float inv_sum[64];         // per row: 1 / row sum, valid with the last block of a fragment
  uint64_t half_full[2][kStages][4], half_empty[2][kStages];
  uint64_t rope_full, rope_empty;
  uint64_t p_full[2], p_empty;
  attention::PartPlan plan;
  attention::BlockPosition next_half[2][4], next_rope;  // what each loading warp loads next
};

template <class Element_, int kHeadDimQK_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimV = 512;
  static constexpr int kRows = 64;                     // query rows (tokens x heads of one KV head) of a CTA
  static constexpr int kBlock = attention::kKvBlock;   // KV tokens of a block
  static constexpr int kTiles = kHeadDimQK / 64;
  static constexpr int kQRegSteps = 27;                // of 16 dims each: dims 0-431 of Q are register operands
  static constexpr int kStages = 3;
  static_assert(kHeadDimQK == 576 || kHeadDimQK == 512, "d_qk is 576 or 512");

  static constexpr int kThreads = 384;  // a score and two output warpgroups
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;

  using Storage = SharedStorage<Element, kTiles, kStages>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
};

}  // namespace flashmla::dense_decode
