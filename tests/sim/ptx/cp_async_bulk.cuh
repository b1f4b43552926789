#pragma once
#include "ptx/mbarrier.cuh"

// What simulator.py puts in the place of a CUtensorMap: the box takes 128 bytes of dimension 0.
struct SimulatedMap {
  const unsigned char* address;
  int64_t strides[5], shape[5];
  int64_t box_rows, element_bytes;
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
    const unsigned char* src = m.address + m.element_bytes * c0 + r * m.strides[1] + c2 * m.strides[2] + c3 * m.strides[3] + c4 * m.strides[4];
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

inline void cp_async_bulk_tensor_5d_evict_first(uint32_t dst, const TensorMap* map, uint32_t bar, int32_t c0, int32_t c1,
                                                int32_t c2, int32_t c3, int32_t c4) {
  cp_async_bulk_tensor_5d(dst, map, bar, c0, c1, c2, c3, c4);
}

inline void cp_async_bulk_tensor_3d_store(const TensorMap* map, uint32_t src, int32_t c0, int32_t c1, int32_t c2) {
  const SimulatedMap& m = *reinterpret_cast<const SimulatedMap*>(map->bytes);
  if (c2 < 0 || c2 >= m.shape[2]) return;
  for (int64_t row = 0; row < m.box_rows && c1 + row < m.shape[1]; row++) {
    unsigned char* dst = const_cast<unsigned char*>(m.address) + m.element_bytes * c0 + (c1 + row) * m.strides[1] + c2 * m.strides[2];
    for (int chunk = 0; chunk < 8; chunk++) {
      uint32_t at = src + 128 * row + 16 * chunk;
      at ^= (at >> 7 & 7) << 4;
      memcpy(dst + 16 * chunk, sim::at(at), 16);
    }
  }
}

inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() {}

}  // namespace flashmla::ptx
