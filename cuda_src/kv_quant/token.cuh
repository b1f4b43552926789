// Where a token lies on both sides, and chunks of 8 values in registers.
#pragma once
#include "common/math.cuh"
#include "common/params.cuh"
#include "kv_quant/config.cuh"
#include "ptx/math.cuh"

namespace flashmla::kv_quant {

template <class Config>
struct Token {
  typename Config::Element* kv;  // d_qk elements
  uint8_t* row;                  // codes, RoPE
  uint8_t* scales;

  __device__ __forceinline__ Token(const KvQuantParams& params, int32_t token) {
    using Format = typename Config::Format;
    const int32_t page = divide_by_magic(token, params.page_size_magic, params.page_size_shift);
    const int32_t slot = token - page * params.page_size;
    kv = reinterpret_cast<typename Config::Element*>(params.kv) + page * params.kv_stride_page +
         slot * params.kv_stride_token;
    uint8_t* page_start = params.cache + page * params.cache_stride_page;
    row = page_start + Format::row_offset(slot);
    scales = page_start + Format::scale_offset(slot, params.page_size);
  }
};

__device__ __forceinline__ void widen(const uint4 (&raw)[1], float (&x)[8]) {
  const uint32_t pairs[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void widen(const uint4 (&raw)[2], float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x[4 * i] = __uint_as_float(raw[i].x);
    x[4 * i + 1] = __uint_as_float(raw[i].y);
    x[4 * i + 2] = __uint_as_float(raw[i].z);
    x[4 * i + 3] = __uint_as_float(raw[i].w);
  }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
  return make_uint4(ptx::cvt_rn_bf16x2(x[0], x[1]), ptx::cvt_rn_bf16x2(x[2], x[3]), ptx::cvt_rn_bf16x2(x[4], x[5]),
                    ptx::cvt_rn_bf16x2(x[6], x[7]));
}

}  // namespace flashmla::kv_quant
