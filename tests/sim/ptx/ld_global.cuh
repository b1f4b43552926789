#pragma once
#include "ptx/ld_st.cuh"
namespace flashmla::ptx {

inline int32_t ld_global(const void* address) { return load<int32_t>(address); }
inline int32_t ld_relaxed(const void* address) { return load<int32_t>(address); }
inline uint4 ld_global_v4(const void* address) { return load<uint4>(address); }

}  // namespace flashmla::ptx
