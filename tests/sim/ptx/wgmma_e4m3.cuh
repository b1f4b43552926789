#pragma once
#include "ptx/cvt_fp8.cuh"
#include "ptx/wgmma.cuh"
namespace flashmla::ptx {

inline float e4m3_element(const Matrix<bf16_t>& matrix, int row, int k) {
  uint32_t address = matrix.start + row / 8 * matrix.stride + row % 8 * 128 + k;
  address ^= (address >> 7 & 7) << 4;
  return e4m3_value(*sim::at(address));
}

template <class A>
inline void multiply_e4m3(float (&d)[32], A a, uint64_t b_desc, int accumulate) {
  const Matrix<bf16_t> b(b_desc);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 2; j++)
      for (int r = 0; r < 2; r++) {
        float sum = accumulate ? d[4 * i + 2 * r + j] : 0.0f;
        for (int k = 0; k < 32; k++) sum += a(r, k) * e4m3_element(b, 8 * i + sim::lane() % 4 * 2 + j, k);
        d[4 * i + 2 * r + j] = sum;
      }
}

inline void wgmma_m64n64k32_ss_e4m3(float (&d)[32], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  const Matrix<bf16_t> matrix(a_desc);
  const int row = threadIdx.x / 32 % 4 * 16 + sim::lane() / 4;
  multiply_e4m3(d, [&](int r, int k) { return e4m3_element(matrix, row + 8 * r, k); }, b_desc, accumulate);
}

inline void wgmma_m64n64k32_rs_e4m3(float (&d)[32], const uint32_t (&registers)[4], uint64_t b_desc, int accumulate) {
  sim::Warp& warp = sim::warp();
  memcpy(warp.registers[sim::lane()], registers, sizeof registers);
  warp.barrier.wait();
  float a[2][32];
  for (int peer = 0; peer < 4; peer++)
    for (int i = 0; i < 4; i++)
      for (int e = 0; e < 4; e++)
        a[i & 1][i / 2 * 16 + 4 * peer + e] = e4m3_value(warp.registers[(sim::lane() & ~3) + peer][i] >> 8 * e & 0xff);
  warp.barrier.wait();
  multiply_e4m3(d, [&](int r, int k) { return a[r][k]; }, b_desc, accumulate);
}

}  // namespace flashmla::ptx
