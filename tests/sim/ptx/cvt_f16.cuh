#pragma once
#include "ptx/math.cuh"
namespace flashmla::ptx {

inline float cvt_f32_f16(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}

}  // namespace flashmla::ptx
