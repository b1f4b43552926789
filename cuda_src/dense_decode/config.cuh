// Compile-time shape of the dense decode kernel on sm_90a.
#pragma once
#include "attention/split.cuh"
#include "common/types.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::dense_decode {

// Exactly the 227 KB a CTA may have: 28 tiles of 8 KB (3 stages of 8 tiles of K and one that is first the RoPE
// tile and then P; the RoPE tile of Q), the 64 x 16 piece of Q that does not fit the registers either, and 1 KB of row
// factors and barriers.
template <class Element, int kStages>
struct alignas(1024) SharedStorage {
  static constexpr int kTileElements = tile::kTileBytes / (int)sizeof(Element);
  Element k_half[2][kStages][4][kTileElements];  // dims 0-255 | 256-511 of a KV block, 64 tokens x 64 dims a tile
  Element rope_or_p[kStages][kTileElements];     // dims 512-575, 64 tokens x 64 dims; then P, 64 rows x 64 tokens
  Element q_rope[kTileElements];                 // dims 512-575 of Q, after what goes to registers has passed through
  Element q_piece[64 * 16];                      // dims 496-511 of Q, 32-byte swizzle
  float rescale[64];         // per row: factor for the accumulated output before this block is added; see rescales
  float inv_sum[64];         // per row: 1 / row sum, valid with the last block of a fragment
  uint8_t rescales[4];       // whether any of a warp's 16 rows has a factor in rescale
  uint64_t half_full[2][kStages][4], half_empty[2][kStages];
  uint64_t rope_full[kStages];
  uint64_t p_full, p_empty;
  attention::PartPlan plan;
  attention::BlockPosition next[2][4];  // what each loading warp loads next
  bool reads_little;                    // of K
};

template <class Element_, int kHeadDimQK_, class Partial_>
struct Config {
  using Element = Element_;
  using Partial = Partial_;  // of partial outputs: float, or fp16_t with factors, see attention/half_partial.cuh
  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kHeadDimV = 512;
  static constexpr int kRows = 64;                     // query rows (tokens x heads of one KV head) of a CTA
  static constexpr int kBlock = attention::kKvBlock;   // KV tokens of a block
  static constexpr int kTiles = kHeadDimQK / 64;
  static constexpr bool kRope = kTiles > 8;
  static constexpr int kQRegSteps = 31;                // of 16 dims each: dims 0-495 of Q are register operands
  static constexpr int kStages = 3;
  static constexpr int kFewBlocks = 2560;              // of K, that all CTAs read: 189 MB, three times the L2
  static_assert(kHeadDimQK == 576 || kHeadDimQK == 512, "d_qk is 576 or 512");

  static constexpr int kThreads = 384;  // a score and two output warpgroups
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kScoreRegisters = 184, kOutputRegisters = 160;  // of 3 * 168 at launch

  using Storage = SharedStorage<Element, kStages>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
};

}  // namespace flashmla::dense_decode
