// Compile-time shape of the combine kernel: plain CUDA, any architecture.
#pragma once
#include "common/types.cuh"

namespace flashmla::combine {

template <int kWarps, int kColumns>
struct SharedStorage {
  float acc[kWarps][kColumns];       // what a warp has summed, where several share a row
  float top[kWarps], sum[kWarps];    // its largest log-sum-exp (log2), its sum of exponentials relative to that
};

template <class Element_, class Partial_ = float>
struct Config {
  using Element = Element_;                     // of the output: bf16_t | fp16_t | float
  using Partial = Partial_;                     // float | fp16_t: with factors, see attention/half_partial.cuh
  static constexpr int kWarpsShift = 4, kWarps = 1 << kWarpsShift;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kColumns = 512;          // that a CTA merges of a row; half of them by two column groups
  static constexpr int kSums = kColumns / 32;   // of which a lane holds these
  static constexpr int kPerVector = 16 / (int)sizeof(Partial);  // columns in 16 bytes
  static constexpr int kVectors = kSums / kPerVector;           // that a lane holds of a partial result
  static constexpr int kAtOnce = 8 / kVectors;  // partial results on their way to a warp
  static_assert(32 % kAtOnce == 0, "a lane weighs one of 32");
  using Shared = SharedStorage<kWarps, kColumns>;
  static constexpr int kSmemBytes = sizeof(Shared);
};

}  // namespace flashmla::combine
