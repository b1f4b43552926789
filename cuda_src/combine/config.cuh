// Compile-time shape of the combine kernel: plain CUDA, any architecture.
#pragma once
#include "common/types.cuh"

namespace flashmla::combine {

template <class Element_>
struct Config {
  using Element = Element_;                     // of the output: bf16_t | fp16_t | float
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kVectors = 4;            // float4 a lane holds: 4 * 128 output columns a pass
  static constexpr int kColumns = kVectors * 128;
  static constexpr int kSmemBytes = kWarps * kColumns * (int)sizeof(float);
};

}  // namespace flashmla::combine
