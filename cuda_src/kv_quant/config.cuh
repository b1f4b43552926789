// Compile-time shape of the FP8 cache kernels: a warp works on one token, in chunks of 8 values a lane.
#pragma once
#include "common/kv_format.cuh"
#include "common/types.cuh"

namespace flashmla::kv_quant {

struct Shape {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kSmemBytes = 0;
};

// token_indices: the type of an index.
template <class... Types>
struct Config : Shape {};

// quantize, dequantize: the cache's format and the element type on the other side, bf16_t | float.
template <class Format_, class Element_>
struct Config<Format_, Element_> : Shape {
  using Format = Format_;
  using Element = Element_;
  static constexpr int kChunk = 8;                            // values of a lane: 8 codes, 16 bytes of bf16
  static constexpr int kVectors = sizeof(Element) * kChunk / 16;  // 16-byte vectors of a chunk of elements
  static constexpr int kChunks = Format::kQk / kChunk;        // of a token
  static constexpr int kNopeChunks = Format::kNope / kChunk;  // those kept as e4m3; the rest is RoPE
  static constexpr int kTileLanes = Format::kTile / kChunk;   // neighbouring lanes that share a scale
  static constexpr int kPasses = (kChunks + 31) / 32;         // lane l holds chunks l, l + 32, ...

  static_assert(32 % kTileLanes == 0, "a tile does not straddle two passes");
};

}  // namespace flashmla::kv_quant
