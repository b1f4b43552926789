// Merges partial attention results by their log-sum-exp: out = sum_i w_i o_i with w_i = 2^(lse_i - lse),
// lse = log2 sum_i 2^lse_i (flash-decoding). With an attention sink the output is divided once more by
// 1 + e^(sink - lse); the returned lse leaves the sink out.
//
// grid    (row groups, split requests at a time, h_kv): up to 16 requests, of more as many as the device holds CTAs for. Those of y
//         merge every gridDim.y-th split request, which is found by the part that holds its second fragment. Where nothing was
//         split, which of a large batch only the plan says, they are gone at once. Direct mode (metadata null, grid.y = 1):
//         n_direct partial results of every row.
// block   8 warps; warps_per_row of them share the partials of one row and add up in shared memory
// PDL     the plan is read before griddepcontrol.wait: the split kernel lets this grid start only after its own wait, so
//         the kernel that wrote the plan is done. The partial results are read after the wait, which every CTA executes:
//         the completion of this grid implies that of the split kernel.
#pragma once
#include "attention/half_partial.cuh"
#include "combine/config.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/cvt_f16.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace flashmla::combine {

// Where the partial results of one row of a request lie: partial 0, then those from the first continuation on.
struct Partials {
  int count;
  int64_t first, rest, step;  // partial 0 is `first`, partial i > 0 is `rest + i * step`; in slots, then in rows
  __device__ __forceinline__ int64_t operator[](int i) const { return i == 0 ? first : rest + i * step; }
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

template <class Element>
__device__ __forceinline__ void store2(Element* dst, float x, float y);
template <>
__device__ __forceinline__ void store2<float>(float* dst, float x, float y) {
  *reinterpret_cast<float2*>(dst) = make_float2(x, y);
}
template <>
__device__ __forceinline__ void store2<bf16_t>(bf16_t* dst, float x, float y) {
  *reinterpret_cast<uint32_t*>(dst) = ptx::cvt_rn_bf16x2(x, y);
}
template <>
__device__ __forceinline__ void store2<fp16_t>(fp16_t* dst, float x, float y) {
  *reinterpret_cast<uint32_t*>(dst) = ptx::cvt_rn_f16x2(x, y);
}

// log2 of the summed exponentials over all partials; -inf if none attended to anything. Every lane gets it.
__device__ __forceinline__ float total_lse_log2(const float* lse, const Partials& partials, float scale) {
  float top = -infinity(), sum = 0.0f;
  for (int i = threadIdx.x % 32; i < partials.count; i += 32) {
    const float x = lse[partials[i]] * scale;
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
    sum = new_top == -infinity() ? sum + other_sum  // 0, or NaN
                                 : sum * ptx::ex2_approx_ftz(top - new_top) + other_sum * ptx::ex2_approx_ftz(other_top - new_top);
    top = new_top;
  }
  return top + ptx::lg2_approx_ftz(sum);
}

// The part that holds the second fragment of the n-th split request, or -1. Every lane gets it.
__device__ __forceinline__ int nth_split_request(const CombineParams& params, int n) {
  constexpr int kLoads = 5;  // on their way at a time: enough for 160 parts
  for (int first = 0; first < params.num_sm_parts; first += 32 * kLoads) {
    int split[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int part = first + 32 * i + threadIdx.x % 32;
      split[i] = part < params.num_sm_parts ? params.metadata[8 * part + 4] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      uint32_t found = __ballot_sync(0xffffffffu, split[i] == 1);
      if (n < __popc(found)) {
        for (; n > 0; n--) found &= found - 1;
        return first + 32 * i + __ffs(found) - 1;
      }
      n -= __popc(found);
    }
  }
  return -1;
}

// What a lane holds of a partial result: 16 bytes of every 32 * kPerVector columns, and what they count.
template <class Config>
struct LanePart {
  uint4 v[Config::kVectors];
  float lse;                         // as stored
  float factor[Config::kVectors];    // of fp16 columns
};

template <class Config>
__device__ __forceinline__ int column_of(int vector) { return Config::kPerVector * (32 * vector + threadIdx.x % 32); }

// row: of the partial results, slot by slot.
template <class Config>
__device__ __forceinline__ void load_part(const CombineParams& params, int64_t row, int first_col, LanePart<Config>& part) {
  using Partial = typename Config::Partial;
  const Partial* src = reinterpret_cast<const Partial*>(params.o_partial) + row * params.d_v + first_col;
#pragma unroll
  for (int v = 0; v < Config::kVectors; v++) {
    const int col = column_of<Config>(v);
    if (first_col + col < params.d_v) part.v[v] = *reinterpret_cast<const uint4*>(src + col);
  }
  part.lse = params.lse_partial[row];
  if constexpr (sizeof(Partial) == 2) {
    const int64_t rows = (int64_t)2 * params.num_sm_parts * params.h_kv * params.s_q * params.heads_per_kv;
    const float* factors = attention::half_partial_factors(params.lse_partial, rows) + row * Config::kVectors;
#pragma unroll
    for (int v = 0; v < Config::kVectors; v++) part.factor[v] = factors[v];
  }
}

template <class Config>
__device__ __forceinline__ void add_part(float (&acc)[16], const LanePart<Config>& part, float weight) {
#pragma unroll
  for (int v = 0; v < Config::kVectors; v++) {
    const uint32_t words[4] = {part.v[v].x, part.v[v].y, part.v[v].z, part.v[v].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (sizeof(typename Config::Partial) == 4) {
        acc[4 * v + i] += weight * __uint_as_float(words[i]);
      } else {
        acc[8 * v + 2 * i] += weight * part.factor[v] * ptx::cvt_f32_f16((uint16_t)words[i]);
        acc[8 * v + 2 * i + 1] += weight * part.factor[v] * ptx::cvt_f32_f16((uint16_t)(words[i] >> 16));
      }
    }
  }
}

// Merges the n-th split request, if there is one. first_of_cta: it has not waited for the split kernel yet. Returns whether there
// may be more.
template <class Config>
__device__ __forceinline__ bool merge(const CombineParams& params, int n, bool first_of_cta) {
  using Element = typename Config::Element;
  int req = 0;
  Partials partials{params.n_direct, 0, 0, 1};
  bool active = true;
  if (params.metadata != nullptr) {
    const int part = nth_split_request(params, n);
    active = part >= 1;
    if (active) {
      req = min(max(params.metadata[8 * part], 0), params.batch - 1);
      const int splits = params.num_splits[req + 1] - params.num_splits[req];
      partials = {min(max(splits, 1), params.num_sm_parts - part + 1), 2 * part - 1, 2 * part - 2, 2};
    }
  }
  const int rows = params.s_q * params.heads_per_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = warp % params.warps_per_row;
  const int row = blockIdx.x * (Config::kWarps / params.warps_per_row) + warp / params.warps_per_row;
  const bool valid = row < rows;
  const int64_t row_index = (int64_t)blockIdx.z * rows + min(row, rows - 1);
  const int64_t slot_stride = (int64_t)params.h_kv * rows;
  partials = {partials.count, row_index + partials.first * slot_stride, row_index + partials.rest * slot_stride,
              partials.step * slot_stride};
  const int token = row / params.heads_per_kv, head = blockIdx.z * params.heads_per_kv + row % params.heads_per_kv;

  // This warp's next partial results; the first are on their way while the weights are found. Where they lie is worked out while
  // the split kernel still runs.
  LanePart<Config> parts[Config::kAtOnce];
  int64_t at[Config::kAtOnce];
#pragma unroll
  for (int j = 0; j < Config::kAtOnce; j++) at[j] = partials[share + j * params.warps_per_row];
  const auto load = [&](int first, int first_col) {
#pragma unroll
    for (int j = 0; j < Config::kAtOnce; j++)
      if (first + j * params.warps_per_row < partials.count) load_part<Config>(params, at[j], first_col, parts[j]);
  };
  // A branch that is always taken: ptxas would move the wait in front of all this.
  int64_t known = at[0];
#pragma unroll
  for (int j = 1; j < Config::kAtOnce; j++) known |= at[j];
  if (first_of_cta && known >= 0) ptx::griddepcontrol_wait();
  if (!active) return false;

  load(share, 0);
  const float lse_log2 = total_lse_log2(params.lse_partial, partials, params.lse_in_scale);
  if (valid && share == 0 && lane == 0)
    params.lse[req * params.lse_stride_batch + head * params.lse_stride_head + token * params.lse_stride_token] = lse_log2 * kLn2;
  float sink_factor = 1.0f;
  if (params.attn_sink != nullptr && valid && lse_log2 != -infinity())
    sink_factor = 1.0f / (1.0f + ptx::ex2_approx_ftz(params.attn_sink[head] * kLog2E - lse_log2));

  extern __shared__ __align__(16) float partial_sums[];  // (kWarps, kColumns)
  for (int first_col = 0; first_col < params.d_v; first_col += Config::kColumns) {
    float acc[16];
#pragma unroll
    for (int k = 0; k < 16; k++) acc[k] = 0.0f;
    for (int first = share; first < partials.count; first += Config::kAtOnce * params.warps_per_row) {
      if (first > share || first_col > 0) {
#pragma unroll
        for (int j = 0; j < Config::kAtOnce; j++) at[j] = partials[first + j * params.warps_per_row];
        load(first, first_col);
      }
#pragma unroll
      for (int j = 0; j < Config::kAtOnce; j++) {
        if (first + j * params.warps_per_row >= partials.count) break;
        const float x = parts[j].lse * params.lse_in_scale;
        if (x == -infinity()) continue;  // attended to nothing; its output does not count, whatever it is
        add_part<Config>(acc, parts[j], ptx::ex2_approx_ftz(x - lse_log2));
      }
    }
    Element* dst = reinterpret_cast<Element*>(params.out) + req * params.out_stride_batch + token * params.out_stride_token +
                   head * params.out_stride_head + first_col;
    if (params.warps_per_row == 1) {
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const int col = column_of<Config>(k / Config::kPerVector) + k % Config::kPerVector;
        if (valid && first_col + col < params.d_v)
          store4<Element>(dst + col, make_float4(acc[k] * sink_factor, acc[k + 1] * sink_factor,
                                                 acc[k + 2] * sink_factor, acc[k + 3] * sink_factor));
      }
      continue;
    }
    float* sums = partial_sums + warp * Config::kColumns;
#pragma unroll
    for (int k = 0; k < 16; k += 4)
      *reinterpret_cast<float4*>(sums + column_of<Config>(k / Config::kPerVector) + k % Config::kPerVector) =
          make_float4(acc[k], acc[k + 1], acc[k + 2], acc[k + 3]);
    __syncthreads();
    sums -= share * Config::kColumns;  // of the row
    for (int col = 2 * (32 * share + lane); col < min(Config::kColumns, params.d_v - first_col); col += 64 * params.warps_per_row) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
      for (int other = 0; other < params.warps_per_row; other++) {
        const float2 x = *reinterpret_cast<const float2*>(sums + other * Config::kColumns + col);
        sum.x += x.x;
        sum.y += x.y;
      }
      if (valid) store2<Element>(dst + col, sum.x * sink_factor, sum.y * sink_factor);
    }
    __syncthreads();
  }
  return true;
}

template <class Config>
__device__ __forceinline__ void kernel(const CombineParams& params) {
  ptx::griddepcontrol_launch_dependents();
  const int most = params.metadata == nullptr ? 1 : min(params.num_sm_parts - 1, params.batch);  // split requests
  for (int n = blockIdx.y; n < most; n += gridDim.y)
    if (!merge<Config>(params, n, n == blockIdx.y)) break;
}

}  // namespace flashmla::combine
