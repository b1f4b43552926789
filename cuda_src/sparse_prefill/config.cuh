// Compile-time shape of the sparse prefill kernel on sm_90a.
#pragma once
#include "attention/token_validity.cuh"
#include "common/types.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_prefill {

// What a loading warp loads next: a block of the index list of a query token. It lives in shared memory because the
// accumulators leave no registers for it.
struct alignas(16) Cursor {
  const int32_t* entries;  // of the list, from that block on
  const uint8_t* kv;       // row 0 of the token's request
  int32_t item;            // params.items or more: there is nothing left
  int32_t left;            // entries of the list from that block on
  int32_t kv_rows;         // of the request
};

// Exactly the 227 KB a CTA may have (d_qk 576): 28 tiles of 8 KB (3 stages of 8 tiles of K and one that is first the RoPE
// tile and then P; the RoPE tile of Q), the 64 x 16 piece of Q that does not fit the registers either, and 1 KB of row
// factors, barriers and cursors.
template <bool kRope, int kStages>
struct alignas(1024) SharedStorage {
  static constexpr int kTileElements = tile::kTileBytes / 2;
  bf16_t k_half[2][kStages][4][kTileElements];  // dims 0-255 | 256-511 of a block, 64 tokens x 64 dims a tile
  bf16_t rope_or_p[kStages][kTileElements];     // dims 512-575, 64 tokens x 64 dims; then P, 64 rows x 64 tokens
  bf16_t q_rope[kRope ? kTileElements : 512];   // dims 512-575 of Q; absent (but for alignment) for d_qk 512
  bf16_t q_piece[64 * 16];                      // dims 496-511 of Q, 32-byte swizzle
  float rescale[64];         // per row: factor for the accumulated output before this block is added
  float inv_sum[64];         // per row: 1 / (row sum and the sink), valid with the last block of an item
  Cursor cursor[2][4];       // of each loading warp
  attention::TokenValidity valid[kStages];
  uint64_t full[kStages], half_empty[2][kStages];
  uint64_t q_full, p_full, p_empty;
};

template <int kHeadDimQK_>
struct Config {
  static constexpr int kHeadDimQK = kHeadDimQK_;
  static constexpr int kRows = 64;       // heads of one query token, the rows of a CTA
  static constexpr int kBlock = 64;      // tokens of a block
  static constexpr int kTiles = kHeadDimQK / 64;
  static constexpr bool kRope = kTiles > 8;
  static constexpr int kQRegSteps = 31;  // of 16 dims each: dims 0-495 of Q are register operands
  static constexpr int kStages = 3;
  static_assert(kHeadDimQK == 576 || kHeadDimQK == 512, "d_qk is 576 or 512");

  static constexpr int kThreads = 384;  // a score and two output warpgroups
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kScoreRegisters = 184, kOutputRegisters = 160;  // of 3 * 168 at launch

  using Storage = SharedStorage<kRope, kStages>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
};

}  // namespace flashmla::sparse_prefill
