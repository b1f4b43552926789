// Compile-time shape of the combine kernel: plain CUDA, any architecture.
#pragma once
#include "common/types.cuh"

namespace flashmla::combine {

template <int kWarps, int kColumns>
struct SharedStorage {
  float acc[kWarps][kColumns];       // what a warp has summed, where several share a row
  float top[kWarps], sum[kWarps];    // its largest log-sum-exp (log2), its sum of exponentials relative to that
};

// kRows rows at a time, and of each kResults partial results, are a warp's, for each a group of kLanes lanes.
template <class Element_, class Partial_ = float, int kRows_ = 1, int kResults_ = 1>
struct Config {
  using Element = Element_;                     // of the output: bf16_t | fp16_t | float
  using Partial = Partial_;                     // float | fp16_t: with factors, see attention/half_partial.cuh
  static constexpr int kRows = kRows_, kResults = kResults_, kLanes = 32 / (kRows * kResults);
  static constexpr int kWarpsShift = 4, kWarps = 1 << kWarpsShift;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kColumns = kResults == 1 ? 512 : 128;  // that a CTA merges of a row; half of 512 where two share them
  static constexpr int kSums = kColumns / kLanes;             // of which a lane holds these
  static constexpr int kPerVector = 16 / (int)sizeof(Partial);  // columns in 16 bytes
  static constexpr int kVectors = kSums / kPerVector;           // that a lane holds of a partial result
  static constexpr int kAtOnce = 8 / kVectors;  // partial results on their way to a group
  static constexpr int kWeights = sizeof(Partial) == 2 && kColumns > 256 ? 2 : 1;  // of each: fp16 has a factor for 256 columns
  static_assert(kRows == 1 || kResults == 1, "lanes are shared by rows or by partial results");
  static_assert(kLanes % kAtOnce == 0, "a lane weighs one of kLanes");
  using Shared = SharedStorage<kWarps, kColumns>;
  static constexpr int kSmemBytes = sizeof(Shared);
};

}  // namespace flashmla::combine
