#pragma once
namespace flashmla::ptx {

inline uint32_t tid_x() { return threadIdx.x; }

}  // namespace flashmla::ptx
