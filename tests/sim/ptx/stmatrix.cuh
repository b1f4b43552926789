#pragma once
namespace flashmla::ptx {

// Lane l names row l % 8 of matrix l / 8 and holds two values of row l / 4 of each matrix.
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  sim::Warp& warp = sim::warp();
  warp.words[sim::lane()] = address;
  warp.barrier.wait();
  for (int i = 0; i < 4; i++) memcpy(sim::at(warp.words[8 * i + sim::lane() / 4]) + 4 * (sim::lane() % 4), &r[i], 4);
  warp.barrier.wait();
}

}  // namespace flashmla::ptx
