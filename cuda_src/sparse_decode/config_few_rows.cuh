// Compile-time shape of the FP8 decode kernel for few query rows.
#pragma once
#include "attention/split.cuh"
#include "common/types.cuh"
#include "sparse_decode/config.cuh"

namespace flashmla::sparse_decode {

template <class Format>
struct FewRows {};  // in place of the format: the kernel for few query rows

template <int kGroups, int kStages, int kStageBytes>
struct alignas(1024) FewRowsStorage {
  uint8_t tokens[kStages][kStageBytes];  // the tokens of a unit, as they lie in the cache
  union {
    struct {
      float4 partial[4][4][32];  // warp, tile of 8 tokens, lane: scores over a warp's dims
      float4 total[4][32];       // tile, lane: scores, log2
    } exchange[kGroups];
    float4 output[4][16][32];    // warp, tile of dims, lane: the output of one group, at the end of a request
  };
  float scales[4 * kGroups][4][4][4];      // warp, tile of 8 tokens, column pair: two scales, their log2
  uint4 q_rope[4 * kGroups][32];           // warp, lane: A fragments of the warp's 16 RoPE dims of Q
  float4 q_unit[4 * kGroups][32];          // warp, lane: factors of the scores of rows g and g + 8; two unused
  uint32_t magnitude[4 * kGroups][16];     // warp, row: of Q over the warp's dims
  float2 sums[4 * kGroups][16];            // warp, row: what its sum is relative to (log2), and the sum
  uint32_t valid[kStages];                 // a bit a token: its index is one of the cache
  uint32_t lap[kStages];                   // parity of the lap that the stage was last filled in; 1 before the first
  uint64_t full[kStages], empty[kStages], merge;
  attention::PartPlan plan;
};

template <class Format_, bool kPaged_>
struct Config<FewRows<Format_>, kPaged_, false> {
  using Format = Format_;
  static constexpr bool kPaged = kPaged_;  // keys by a block table (dense decode) instead of index lists
  static constexpr int kRows = 16;         // query rows of a CTA, those of one mma
  static constexpr int kUnit = 32;         // tokens that a group takes at a time: half a block of the plan
  static constexpr int kHeadDimV = 512;
  static constexpr int kGroups = 3;        // of four warps, which take units in turn
  static constexpr int kStages = 8;        // units in shared memory: one a group, the others on their way

  static constexpr int kConsumerWarps = 4 * kGroups;
  static constexpr int kProducerWarps = attention::kKvBlock / kUnit;  // one for each unit of a block
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kGroupRegisters = 160, kProducerRegisters = 32;
  static_assert(kGroups * kGroupRegisters + kProducerRegisters <= 65536 / 128, "registers of an SM");

  using Storage = FewRowsStorage<kGroups, kStages, kUnit * Format::kRowBytes>;
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory a CTA");
  static_assert(Format::kScalesInRow && Format::kNope == 512 && Format::kTile == 128, "a warp has the dims of one scale");
  static_assert(Format::kRowBytes % 128 == 16, "eight tokens meet eight different groups of banks");
  static_assert(kUnit * Format::kRowBytes % 128 == 0, "the bank of a token does not depend on the stage");
};

}  // namespace flashmla::sparse_decode
