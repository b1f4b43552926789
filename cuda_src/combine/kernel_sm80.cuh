// Merges partial attention results by their log-sum-exp: out = sum_i w_i o_i with w_i = 2^(lse_i - lse),
// lse = log2 sum_i 2^lse_i (flash-decoding). With an attention sink the output is divided once more by
// 1 + e^(sink - lse); the returned lse leaves the sink out.
//
// grid    (row groups, min(num_sm_parts - 1, batch), h_kv): y counts the split requests, by the part that holds their
//         second fragment; there are never more than that, and a CTA without one returns. Direct mode (metadata null,
//         grid.y = 1): n_direct partial results of every row.
// block   8 warps; warps_per_row of them share the partials of one row and add up in shared memory
// PDL     the plan is read before griddepcontrol.wait: the split kernel lets this grid start only after its own wait, so
//         the kernel that wrote the plan is done. The partial results are read after the wait, which every CTA executes:
//         the completion of this grid implies that of the split kernel.
#pragma once
#include "combine/config.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace flashmla::combine {

// Where the partial results of one request lie: partial 0, then those from the first continuation on.
struct Partials {
  int count;
  int64_t first, rest, step;  // slots: partial 0 is `first`, partial i > 0 is `rest + i * step`
  __device__ __forceinline__ int64_t slot(int i) const { return i == 0 ? first : rest + i * step; }
};

template <class Element>
__device__ __forceinline__ void store4(Element* dst, float4 v);
template <>
__device__ __forceinline__ void store4<float>(float* dst, float4 v) { *reinterpret_cast<float4*>(dst) = v; }
template <>
__device__ __forceinline__ void store4<bf16_t>(bf16_t* dst, float4 v) {
  *reinterpret_cast<uint2*>(dst) = make_uint2(ptx::cvt_rn_bf16x2(v.x, v.y), ptx::cvt_rn_bf16x2(v.z, v.w));
}
template <>
__device__ __forceinline__ void store4<fp16_t>(fp16_t* dst, float4 v) {
  *reinterpret_cast<uint2*>(dst) = make_uint2(ptx::cvt_rn_f16x2(v.x, v.y), ptx::cvt_rn_f16x2(v.z, v.w));
}

__device__ __forceinline__ void add_scaled(float4& acc, float w, float4 v) {
  acc.x += w * v.x;
  acc.y += w * v.y;
  acc.z += w * v.z;
  acc.w += w * v.w;
}

// log2 of the summed exponentials over all partials; -inf if none attended to anything. Every lane gets it.
__device__ __forceinline__ float total_lse_log2(const float* lse, const Partials& partials, int64_t slot_stride,
                                                float scale) {
  float top = -infinity(), sum = 0.0f;
  for (int i = threadIdx.x % 32; i < partials.count; i += 32) {
    const float x = lse[partials.slot(i) * slot_stride] * scale;
    if (x > top) {
      sum *= ptx::ex2_approx_ftz(top - x);
      top = x;
    }
    if (x != -infinity()) sum += ptx::ex2_approx_ftz(x - top);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other_top = __shfl_xor_sync(0xffffffffu, top, offset);
    const float other_sum = __shfl_xor_sync(0xffffffffu, sum, offset);
    const float new_top = fmaxf(top, other_top);
    if (new_top != -infinity())
      sum = sum * ptx::ex2_approx_ftz(top - new_top) + other_sum * ptx::ex2_approx_ftz(other_top - new_top);
    top = new_top;
  }
  return top + ptx::lg2_approx_ftz(sum);
}

// The part that holds the second fragment of the n-th split request, or -1. Every lane gets it.
__device__ __forceinline__ int nth_split_request(const CombineParams& params, int n) {
  for (int first = 0; first < params.num_sm_parts; first += 32) {
    const int part = first + threadIdx.x % 32;
    const bool second_fragment = part < params.num_sm_parts && params.metadata[8 * part + 4] == 1;
    uint32_t found = __ballot_sync(0xffffffffu, second_fragment);
    if (n < __popc(found)) {
      for (; n > 0; n--) found &= found - 1;
      return first + __ffs(found) - 1;
    }
    n -= __popc(found);
  }
  return -1;
}

template <class Config>
__device__ __forceinline__ void load_partial(const float* src, int columns, float4 (&o)[Config::kVectors]) {
#pragma unroll
  for (int v = 0; v < Config::kVectors; v++) {
    const int col = 128 * v + 4 * (threadIdx.x % 32);
    if (col < columns) o[v] = *reinterpret_cast<const float4*>(src + col);
  }
}

template <class Config>
__device__ __forceinline__ void kernel(const CombineParams& params) {
  using Element = typename Config::Element;
  ptx::griddepcontrol_launch_dependents();

  int req = 0;
  Partials partials{params.n_direct, 0, 0, 1};
  bool active = true;
  if (params.metadata != nullptr) {
    const int part = nth_split_request(params, blockIdx.y);
    active = part >= 1;
    if (active) {
      req = min(max(params.metadata[8 * part], 0), params.batch - 1);
      const int splits = params.num_splits[req + 1] - params.num_splits[req];
      partials = {min(max(splits, 1), params.num_sm_parts - part + 1), 2 * part - 1, 2 * part - 2, 2};
    }
  }
  ptx::griddepcontrol_wait();
  if (!active) return;

  const int rows = params.s_q * params.heads_per_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = warp % params.warps_per_row;
  const int row = blockIdx.x * (Config::kWarps / params.warps_per_row) + warp / params.warps_per_row;
  const bool valid = row < rows;
  const int64_t row_index = (int64_t)blockIdx.z * rows + min(row, rows - 1);
  const int64_t slot_stride = (int64_t)params.h_kv * rows;
  const int token = row / params.heads_per_kv, head = blockIdx.z * params.heads_per_kv + row % params.heads_per_kv;

  const float* lse = params.lse_partial + row_index;
  const float* o_partial = params.o_partial + row_index * params.d_v;
  float4 o[Config::kVectors];  // of this warp's next partial; the first is on its way while the weights are found
  if (share < partials.count)
    load_partial<Config>(o_partial + partials.slot(share) * slot_stride * params.d_v, params.d_v, o);
  const float lse_log2 = total_lse_log2(lse, partials, slot_stride, params.lse_in_scale);
  if (valid && share == 0 && lane == 0)
    params.lse[req * params.lse_stride_batch + head * params.lse_stride_head + token * params.lse_stride_token] =
        lse_log2 * kLn2;
  float sink_factor = 1.0f;
  if (params.attn_sink != nullptr && valid && lse_log2 != -infinity())
    sink_factor = 1.0f / (1.0f + ptx::ex2_approx_ftz(params.attn_sink[head] * kLog2E - lse_log2));

  extern __shared__ __align__(16) float partial_sums[];  // (kWarps, kColumns)
  for (int first_col = 0; first_col < params.d_v; first_col += Config::kColumns) {
    const int columns = params.d_v - first_col;
    float4 acc[Config::kVectors];
#pragma unroll
    for (int v = 0; v < Config::kVectors; v++) acc[v] = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (int i = share; i < partials.count; i += params.warps_per_row) {
      const int64_t index = partials.slot(i) * slot_stride;
      if (i > share || first_col > 0) load_partial<Config>(o_partial + index * params.d_v + first_col, columns, o);
      const float x = lse[index] * params.lse_in_scale;
      if (x == -infinity()) continue;  // attended to nothing; its output does not count, whatever it is
      const float weight = ptx::ex2_approx_ftz(x - lse_log2);
#pragma unroll
      for (int v = 0; v < Config::kVectors; v++) add_scaled(acc[v], weight, o[v]);
    }
    if (params.warps_per_row > 1) {
      float4* mine = reinterpret_cast<float4*>(partial_sums + warp * Config::kColumns) + lane;
#pragma unroll
      for (int v = 0; v < Config::kVectors; v++) mine[32 * v] = acc[v];
      __syncthreads();
      if (share == 0) {
        for (int other = 1; other < params.warps_per_row; other++) {
#pragma unroll
          for (int v = 0; v < Config::kVectors; v++)
            add_scaled(acc[v], 1.0f, mine[other * (Config::kColumns / 4) + 32 * v]);
        }
      }
      __syncthreads();
    }
    if (valid && share == 0) {
      Element* dst = reinterpret_cast<Element*>(params.out) + req * params.out_stride_batch +
                     token * params.out_stride_token + head * params.out_stride_head + first_col + 4 * lane;
#pragma unroll
      for (int v = 0; v < Config::kVectors; v++) {
        if (128 * v + 4 * lane < columns)
          store4<Element>(dst + 128 * v, make_float4(acc[v].x * sink_factor, acc[v].y * sink_factor,
                                                     acc[v].z * sink_factor, acc[v].w * sink_factor));
      }
    }
  }
}

}  // namespace flashmla::combine
