#pragma once
namespace flashmla::ptx {

inline uint32_t tid_x() { return threadIdx.x; }

inline uint32_t ctaid_x() { return blockIdx.x; }
inline uint32_t ctaid_y() { return blockIdx.y; }

}  // namespace flashmla::ptx
