#pragma once
#include "ptx/wgmma.cuh"
namespace flashmla::ptx {

template <int kFirst>
inline void wgmma_m64n128k16_ss_mn_bf16(float (&d)[128], uint64_t a_desc, uint64_t b_desc) {
  Rows a;
  rows_of<bf16_t>(a_desc, a);
  const Matrix<bf16_t> b(b_desc);
  multiply<128>(reinterpret_cast<float(&)[64]>(d[kFirst]), a, 1, [&](int k, int n) { return b.mn_major(k, n); });
}

}  // namespace flashmla::ptx
