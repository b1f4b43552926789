#pragma once
#include "ptx/mbarrier.cuh"

// What simulator.py puts in the place of a CUtensorMap: dimension 0 is of 16-bit elements, its box 64 of them.
struct SimulatedMap {
  const unsigned char* address;
  int64_t strides[5], shape[5];
  int64_t box_rows;
};

namespace flashmla::ptx {

inline void prefetch_tensormap(const TensorMap*) {}

inline void cp_async_bulk_tensor_5d(uint32_t dst, const TensorMap* map, uint32_t bar, int32_t c0, int32_t c1, int32_t c2,
                                    int32_t c3, int32_t c4) {
  const SimulatedMap& m = *reinterpret_cast<const SimulatedMap*>(map->bytes);
  const auto inside = [&](int axis, int64_t c) { return c >= 0 && c < m.shape[axis]; };
  for (int row = 0; row < m.box_rows; row++) {
    const int64_t r = (int64_t)c1 + row;
    const bool exists = inside(1, r) && inside(2, c2) && inside(3, c3) && inside(4, c4);
    const unsigned char* src = m.address + 2 * c0 + r * m.strides[1] + c2 * m.strides[2] + c3 * m.strides[3] + c4 * m.strides[4];
    for (int chunk = 0; chunk < 8; chunk++) {
      uint32_t at = dst + 128 * row + 16 * chunk;
      at ^= (at >> 7 & 7) << 4;
      if (exists)
        memcpy(sim::at(at), src + 16 * chunk, 16);
      else
        memset(sim::at(at), 0, 16);
    }
  }
  mbarrier_update(bar, 0, -128 * (int)m.box_rows);
}

}  // namespace flashmla::ptx
