// Shared-memory tiles of 64 rows x 128 bytes in the 128-byte swizzle that TMA writes and wgmma reads, and the wgmma
// matrix descriptors for them (PTX ISA, "Asynchronous warpgroup level matrix shared memory layout").
#pragma once
#include "common/types.cuh"

namespace flashmla::tile {

constexpr int kTileRows = 64;
constexpr int kTileRowBytes = 128;                        // 64 elements of 16 bits
constexpr int kTileBytes = kTileRows * kTileRowBytes;     // 8192
constexpr uint32_t kSwizzleAtomBytes = 8 * kTileRowBytes; // 8 rows: the swizzle repeats every 1024 bytes

__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Byte offset of 16-byte chunk `chunk` (0..7) of row `row` inside a tile.
__device__ __forceinline__ uint32_t swizzle_128b(int row, int chunk) {
  return row * kTileRowBytes + ((chunk ^ (row & 7)) << 4);
}

// The same for a tile of 64 rows x 32 bytes (16 elements along k) in the 32-byte swizzle; chunk 0 | 1.
__device__ __forceinline__ uint32_t swizzle_32b(int row, int chunk) {
  return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
}

// Both 128-byte layouts step 1024 bytes from one group of 8 rows to the next; `leading_bytes` is the step between 64-element
// tiles along the contiguous axis, which only an MN-major operand wider than one tile uses.
__device__ __forceinline__ uint64_t desc_128b(uint32_t addr, uint32_t leading_bytes) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(leading_bytes >> 4) << 16) |
         ((uint64_t)(kSwizzleAtomBytes >> 4) << 32) | ((uint64_t)1 << 62);
}

// A or B with the reduction axis contiguous (Q, K and P): 16 elements further along k are 32 bytes.
__device__ __forceinline__ uint64_t k_major_desc(uint32_t tile_addr) { return desc_128b(tile_addr, 16); }
constexpr uint32_t kKMajorStepBytes = 32;

// A of a single 16-element step in the 32-byte swizzle: groups of 8 rows are 256 bytes apart.
__device__ __forceinline__ uint64_t k_major_desc_32b(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)(256 >> 4) << 32) | ((uint64_t)3 << 62);
}

// B with the N axis contiguous (V, read from the K tiles): 16 rows (tokens) further are 2048 bytes; tiles of 64
// columns follow each other.
__device__ __forceinline__ uint64_t mn_major_desc(uint32_t tile_addr) { return desc_128b(tile_addr, kTileBytes); }
constexpr uint32_t kMnMajorStepBytes = 16 * kTileRowBytes;

__device__ __forceinline__ uint64_t advance(uint64_t desc, uint32_t bytes) { return desc + (bytes >> 4); }

}  // namespace flashmla::tile
