#pragma once
namespace flashmla::ptx {

// Lane l names row l % 8 of matrix l / 8 and gets two values of row l / 4 of each matrix.
inline void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  sim::Warp& warp = sim::warp();
  warp.words[sim::lane()] = address;
  warp.barrier.wait();
  for (int i = 0; i < 4; i++) memcpy(&r[i], sim::at(warp.words[8 * i + sim::lane() / 4]) + 4 * (sim::lane() % 4), 4);
  warp.barrier.wait();
}

}  // namespace flashmla::ptx
