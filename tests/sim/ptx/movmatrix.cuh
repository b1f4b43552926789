#pragma once
namespace flashmla::ptx {

inline uint32_t movmatrix_trans(uint32_t a) {
  return sim::among_lanes(a, [](const unsigned long long* words) {
    const int row = sim::lane() / 4, column = sim::lane() % 4 * 2;  // of the result
    uint32_t r = 0;
    for (int j = 0; j < 2; j++) r |= (uint32_t)(words[(column + j) * 4 + row / 2] >> row % 2 * 16 & 0xffff) << 16 * j;
    return r;
  });
}

}  // namespace flashmla::ptx
