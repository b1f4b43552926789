#pragma once
#include "ptx/cvt_fp8.cuh"
namespace flashmla::ptx {

inline uint32_t cvt_rn_f16x2_e4m3x2_low(uint32_t codes) { return cvt_rn_f16x2_e4m3x2((uint16_t)codes); }
inline uint32_t cvt_rn_f16x2_e4m3x2_high(uint32_t codes) { return cvt_rn_f16x2_e4m3x2((uint16_t)(codes >> 16)); }

}  // namespace flashmla::ptx
