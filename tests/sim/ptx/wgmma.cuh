#pragma once
namespace flashmla::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int kPending>
inline void wgmma_wait_group() {}

template <class Element>
inline float widened(uint16_t bits) {
  if (std::is_same<Element, bf16_t>::value) return __uint_as_float((uint32_t)bits << 16);
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}

// A shared-memory matrix descriptor, and the elements it describes.
template <class Element>
struct Matrix {
  uint32_t start, leading, stride, swizzle;
  explicit Matrix(uint64_t desc)
      : start((desc & 0x3fff) << 4), leading((desc >> 16 & 0x3fff) << 4), stride((desc >> 32 & 0x3fff) << 4),
        swizzle(desc >> 62) {}
  float element(uint32_t address) const {
    address ^= swizzle == 1 ? (address >> 7 & 7) << 4 : swizzle == 3 ? (address >> 7 & 1) << 4 : 0;
    uint16_t bits;
    memcpy(&bits, sim::at(address), 2);
    return widened<Element>(bits);
  }
  float k_major(int row, int k) const {
    return element(start + row / 8 * stride + row % 8 * (swizzle == 1 ? 128 : 32) + 2 * k);
  }
  float mn_major(int k, int n) const { return element(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + 2 * (n % 64)); }
};

using Rows = float[2][16];  // this thread's two rows of A

template <class Element>
inline void rows_of(uint64_t a_desc, Rows& a) {
  const Matrix<Element> matrix(a_desc);
  const int row = threadIdx.x / 32 % 4 * 16 + sim::lane() / 4;
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 16; k++) a[r][k] = matrix.k_major(row + 8 * r, k);
}

template <class Element>
inline void rows_of(const uint32_t (&registers)[4], Rows& a) {
  sim::Warp& warp = sim::warp();
  memcpy(warp.registers[sim::lane()], registers, sizeof registers);
  warp.barrier.wait();
  for (int peer = 0; peer < 4; peer++)
    for (int i = 0; i < 4; i++)
      for (int e = 0; e < 2; e++)
        a[i & 1][i / 2 * 8 + 2 * peer + e] = widened<Element>(warp.registers[(sim::lane() & ~3) + peer][i] >> 16 * e);
  warp.barrier.wait();
}

template <int kN, class B>
inline void multiply(float (&d)[kN / 2], const Rows& a, int accumulate, B b) {
  for (int i = 0; i < kN / 8; i++)
    for (int j = 0; j < 2; j++) {
      float column[16];
      for (int k = 0; k < 16; k++) column[k] = b(k, 8 * i + sim::lane() % 4 * 2 + j);
      for (int r = 0; r < 2; r++) {
        float sum = accumulate ? d[4 * i + 2 * r + j] : 0.0f;
        for (int k = 0; k < 16; k++) sum += a[r][k] * column[k];
        d[4 * i + 2 * r + j] = sum;
      }
    }
}

template <class Element>
inline void wgmma_m64n64k16_ss(float (&d)[32], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  Rows a;
  rows_of<Element>(a_desc, a);
  const Matrix<Element> b(b_desc);
  multiply<64>(d, a, accumulate, [&](int k, int n) { return b.k_major(n, k); });
}

template <class Element>
inline void wgmma_m64n64k16_rs(float (&d)[32], const uint32_t (&registers)[4], uint64_t b_desc, int accumulate) {
  Rows a;
  rows_of<Element>(registers, a);
  const Matrix<Element> b(b_desc);
  multiply<64>(d, a, accumulate, [&](int k, int n) { return b.k_major(n, k); });
}

template <class Element>
inline void wgmma_m64n256k16_ss_mn(float (&d)[128], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  Rows a;
  rows_of<Element>(a_desc, a);
  const Matrix<Element> b(b_desc);
  multiply<256>(d, a, accumulate, [&](int k, int n) { return b.mn_major(k, n); });
}


}  // namespace flashmla::ptx
