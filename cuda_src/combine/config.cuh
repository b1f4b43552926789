// Compile-time shape of the combine kernel: plain CUDA, any architecture.
#pragma once
#include "common/types.cuh"

namespace flashmla::combine {

template <class Element_, class Partial_ = float>
struct Config {
  using Element = Element_;                     // of the output: bf16_t | fp16_t | float
  using Partial = Partial_;                     // float | fp16_t: with factors, see attention/half_partial.cuh
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = 2;
  static constexpr int kClusterX = 1;
  static constexpr int kColumns = 512;          // of a pass; a lane holds 16 of them
  static constexpr int kPerVector = 16 / (int)sizeof(Partial);  // columns in 16 bytes
  static constexpr int kVectors = kColumns / 32 / kPerVector;   // that a lane holds of a partial result
  static constexpr int kAtOnce = 4;
  static constexpr int kSmemBytes = kWarps * kColumns * (int)sizeof(float);
};

}  // namespace flashmla::combine
