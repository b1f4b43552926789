#pragma once
#include "ptx/cvt_f16.cuh"
#include "ptx/cvt_fp8.cuh"
namespace flashmla::ptx {

struct MmaOperands {
  uint32_t a[4], b[2];
};
// Two sets, used in turn: who is a product ahead does not overwrite what another lane still reads.
static MmaOperands mma_operands[sim::kMaxCluster][sim::kMaxThreads][2];
static thread_local unsigned mma_count;

template <class Value>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
  const unsigned set = mma_count++ & 1, first = threadIdx.x / 32 * 32;
  MmaOperands(*lanes)[2] = mma_operands[sim::rank] + first;
  lanes[sim::lane()][set] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  sim::warp().barrier.wait();
  for (int i = 0; i < 4; i++) {
    const int row = sim::lane() / 4 + i / 2 * 8, column = sim::lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const int lane_in_quad = k % 8 / 2, shift = k % 2 * 16;
      const uint32_t x = lanes[row % 8 * 4 + lane_in_quad][set].a[k / 8 * 2 + row / 8] >> shift;
      const uint32_t y = lanes[column * 4 + lane_in_quad][set].b[k / 8] >> shift;
      d[i] += value((uint16_t)x) * value((uint16_t)y);
    }
  }
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, cvt_f32_f16);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(d, a, b0, b1, [](uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); });
}

}  // namespace flashmla::ptx
