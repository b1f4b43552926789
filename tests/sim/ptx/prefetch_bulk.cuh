#pragma once
namespace flashmla::ptx {

inline void cp_async_bulk_prefetch_tensor_5d(const TensorMap*, int32_t, int32_t, int32_t, int32_t, int32_t) {}

}  // namespace flashmla::ptx
