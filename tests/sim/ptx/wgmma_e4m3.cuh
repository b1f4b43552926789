#pragma once
#include "ptx/cvt_fp8.cuh"
#include "ptx/wgmma.cuh"
namespace flashmla::ptx {

inline float e4m3_element(const Matrix<bf16_t>& matrix, int row, int k) {
  uint32_t address = matrix.start + row / 8 * matrix.stride + row % 8 * 128 + k;
  address ^= (address >> 7 & 7) << 4;
  return e4m3_value(*sim::at(address));
}

inline void wgmma_m64n64k32_ss_e4m3(float (&d)[32], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  const Matrix<bf16_t> a(a_desc), b(b_desc);
  const int row = threadIdx.x / 32 % 4 * 16 + sim::lane() / 4;
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 2; j++)
      for (int r = 0; r < 2; r++) {
        float sum = accumulate ? d[4 * i + 2 * r + j] : 0.0f;
        for (int k = 0; k < 32; k++)
          sum += e4m3_element(a, row + 8 * r, k) * e4m3_element(b, 8 * i + sim::lane() % 4 * 2 + j, k);
        d[4 * i + 2 * r + j] = sum;
      }
}

}  // namespace flashmla::ptx
