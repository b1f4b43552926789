// Merges partial attention results by their log-sum-exp: out = sum_i w_i o_i with w_i = 2^(lse_i - lse),
// lse = log2 sum_i 2^lse_i (flash-decoding). With an attention sink the output is divided once more by
// 1 + e^(sink - lse); the returned lse leaves the sink out.
//
// grid    (row groups x column groups, split requests at a time, h_kv), about as many CTAs as the device holds at once. Those of
//         x take rows in turn, those of y split requests: every gridDim.y-th, found by the part that holds its second fragment.
//         Where nothing was split, which only the plan says, they are gone at once. Direct mode (metadata null): n_direct
//         partial results of every row, y counts 512 columns each
// block   16 warps, one CTA an SM; warps_per_row of them share the partial results of a row and add up in shared memory. By Config,
//         the halves of a warp merge a row each (kRows 2), or every second partial result of one (kResults 2)
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
#include "ptx/ld_global.cuh"
#include "ptx/math.cuh"

namespace flashmla::combine {

// Where the fragments of a request lie: 0 in slot `first`, i > 0 in slot `rest` + i * `step`.
struct Slots {
  int count, first, rest, step;
  __device__ __forceinline__ int operator[](int i) const { return i == 0 ? first : rest + i * step; }
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

// A request in several fragments: the part that holds the second one (-1: there is no such request), and their number.
struct SplitRequest {
  int req, part, fragments;
};

// The n-th split request of the plan. Every lane gets it. What runs once is kept short: fetching instructions takes longer.
__device__ __forceinline__ SplitRequest nth_split_request(const CombineParams& params, int n) {
  constexpr int kAhead = 5;  // loads on their way at a time: enough for 160 parts
  const int lane = threadIdx.x % 32;
  // With which of its fragments of a request a part begins: 1 where it is the second, more where it goes on with it.
  const auto begin_split = [&](int part) { return part < params.num_sm_parts ? params.metadata[8 * part + 4] : 0; };
  int next[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; i++) next[i] = begin_split(32 * i + lane);
  SplitRequest found{0, -1, 0};
#pragma unroll 1
  for (int first = 0; first < params.num_sm_parts; first += 32) {
    const int split = next[0];
#pragma unroll
    for (int i = 1; i < kAhead; i++) next[i - 1] = next[i];
    next[kAhead - 1] = begin_split(first + 32 * kAhead + lane);
    const uint32_t second = __ballot_sync(0xffffffffu, split == 1);
    uint32_t others = __ballot_sync(0xffffffffu, split <= 1);
    if (found.part < 0) {
      const uint32_t before = second & ((1u << lane) - 1);
      const uint32_t nth = __ballot_sync(0xffffffffu, split == 1 && __popc(before) == n);
      n -= __popc(second);
      if (nth == 0) continue;
      found.part = first + __ffs(nth) - 1;
      others &= ~(nth | (nth - 1));
    }
    found.fragments = first + (others != 0 ? __ffs(others) : 33) - found.part;
    if (others != 0) break;
  }
  if (found.part >= 0) found.req = params.metadata[8 * found.part];
  return found;
}

// 16 bytes of a partial result times its weight.
template <class Partial>
__device__ __forceinline__ void add(float* acc, const uint4& v, float weight) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(Partial) == 4) {
      acc[i] += weight * __uint_as_float(words[i]);
    } else {
      acc[2 * i] += weight * ptx::cvt_f32_f16((uint16_t)words[i]);
      acc[2 * i + 1] += weight * ptx::cvt_f32_f16((uint16_t)(words[i] >> 16));
    }
  }
}

// Over groups of `lanes` lanes, a power of two.
__device__ __forceinline__ float max_of_lanes(float x, int lanes) {
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// 2^(x - top) for x <= top; where nothing was attended to, 0.
__device__ __forceinline__ float weight_of(float x, float top) { return x == -infinity() ? 0.0f : ptx::ex2_approx_ftz(x - top); }

// The CTA's rows and columns of a request. A group of lanes merges every groups_per_row-th partial result of a row, relative to the
// largest log-sum-exp among its warp's; then the row's groups add up. A lane holds 16 bytes of every kLanes * kPerVector columns;
// lane j of a group weighs the j-th of kLanes of its partial results. waited: for the split kernel; set. What runs once is kept
// short: fetching its instructions takes longer than running them.
template <class Config>
__device__ __forceinline__ void merge(const CombineParams& params, int req, const Slots& slots, bool& waited) {
  using Element = typename Config::Element;
  using Partial = typename Config::Partial;
  constexpr int kVectors = Config::kVectors, kPerVector = Config::kPerVector, kSums = Config::kSums, kLanes = Config::kLanes;
  extern __shared__ __align__(16) uint8_t smem[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(smem);
  const int warps_shift = Config::kRows == 1 ? params.warps_per_row_shift : 0, warps_per_row = 1 << warps_shift;
  const int groups_per_row_shift = warps_shift + Config::kResults - 1, groups_per_row = 1 << groups_per_row_shift;
  const int rows = params.s_q * params.heads_per_kv;
  const int rows_shift = Config::kWarpsShift + Config::kRows - 1 - warps_shift;  // of the CTA at a time
  const int warp = threadIdx.x / 32, warp_of_row = warp & (warps_per_row - 1), lane_of_warp = threadIdx.x % 32;
  const int lane = threadIdx.x % kLanes, group_of_warp = threadIdx.x / kLanes & (Config::kResults - 1);
  const int columns_shift = params.column_groups_shift, columns = Config::kColumns >> (Config::kResults == 1 ? columns_shift : 0);
  const int first_col = (params.metadata == nullptr ? blockIdx.y : blockIdx.x & ((1 << columns_shift) - 1)) * columns;
  const int row_vectors = params.d_v / kPerVector;
  const int first_vector = first_col / kPerVector + lane, end_vector = min(first_col + columns, params.d_v) / kPerVector;
  const int most = min((slots.count + groups_per_row - 1) >> groups_per_row_shift, kLanes);  // partial results of a group
  const int begin = warp_of_row * Config::kResults;  // the warp's first partial result
  const int lanes = most <= 1 ? 1 : 1 << (32 - __clz(most - 1));
  // Sums are relative to 2^headroom times the largest, so that none is larger than what it is of.
  const float headroom = slots.count <= 1 ? 0.0f : 32 - __clz(slots.count - 1);
  const int64_t slot_rows = (int64_t)params.h_kv * rows, slot_vectors = slot_rows * row_vectors;
  const int64_t step_vectors = (slots.step << groups_per_row_shift) * slot_vectors;

  const int row_groups = (rows - 1 >> rows_shift) + 1;

#pragma unroll 1
  for (int group = blockIdx.x >> columns_shift; group < row_groups; group += gridDim.x >> columns_shift) {
    const int row = (group << rows_shift) + (threadIdx.x / kLanes >> groups_per_row_shift);
    const int row_in_slot = blockIdx.z * rows + min(row, rows - 1);
    const uint4* of_row = reinterpret_cast<const uint4*>(params.o_partial) + (int64_t)row_in_slot * row_vectors + first_vector;
    const float* lse_of_row = params.lse_partial + row_in_slot;
    // A branch that is always taken: ptxas would move the wait in front of all this.
    if (!waited && (row_in_slot | slots[warp_of_row]) >= 0) ptx::griddepcontrol_wait();
    waited = true;

    float acc[kSums], top = -infinity(), sum = 0.0f, sink = -infinity();
    float* lse_at = nullptr;
    Element* dst = nullptr;
#pragma unroll
    for (int k = 0; k < kSums; k++) acc[k] = 0.0f;
    float weight[Config::kWeights];
#pragma unroll 1
    for (int at = begin, turn = 0; at < slots.count || at == begin;
         at += Config::kAtOnce << groups_per_row_shift, turn = (turn + Config::kAtOnce) % kLanes) {
      const int first = at + group_of_warp;
      float lse = -infinity();
      if (turn == 0) {  // of the next kLanes; asked for first, for the data would hold it up
        const int n = first + ((lane & (lanes - 1)) << groups_per_row_shift);
        if (n < slots.count) {
          lse = lse_of_row[slots[n] * slot_rows];
          if constexpr (sizeof(Partial) == 2) {
            const float2 factors = *reinterpret_cast<const float2*>(
                attention::half_partial_factors(params.lse_partial, 2 * params.num_sm_parts * slot_rows) +
                2 * (row_in_slot + slots[n] * slot_rows));
            weight[0] = first_col < 256 ? factors.x : factors.y;
            weight[Config::kWeights - 1] = Config::kWeights == 2 ? factors.y : weight[0];
          }
        }
      }
      uint4 v[Config::kAtOnce][kVectors];
      const uint4 *src = of_row + slots[first] * slot_vectors, *next = of_row + slots[first + groups_per_row] * slot_vectors;
#pragma unroll
      for (int j = 0; j < Config::kAtOnce; j++) {
#pragma unroll
        for (int i = 0; i < kVectors; i++)
          if (first + (j << groups_per_row_shift) < slots.count && first_vector + kLanes * i < end_vector)
            v[j][i] = ptx::ld_global_v4(src + kLanes * i);
        src = next;
        next += step_vectors;
      }
      if (at == begin) {  // while all that is on its way
        const int token = divide_by_magic(row, params.heads_per_kv_magic, params.heads_per_kv_shift);
        const int head = blockIdx.z * params.heads_per_kv + row - token * params.heads_per_kv;
        if (params.attn_sink != nullptr && row < rows) sink = params.attn_sink[head] * kLog2E;
        lse_at = params.lse + req * params.lse_stride_batch + head * params.lse_stride_head + token * params.lse_stride_token;
        dst = reinterpret_cast<Element*>(params.out) + req * params.out_stride_batch + token * params.out_stride_token +
              head * params.out_stride_head;
      }
      if (turn == 0) {
        lse *= params.lse_in_scale;
        const float before = top;
        float largest = max_of_lanes(lse, lanes);
        if (Config::kResults == 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, kLanes));
        top = fmaxf(top, largest + headroom);
        const float rescale = weight_of(before, top), of_lane = weight_of(lse, top);
        sum = sum * rescale + sum_of_lanes(of_lane, lanes);
        if (at > begin) {
#pragma unroll
          for (int k = 0; k < kSums; k++) acc[k] *= rescale;
        }
#pragma unroll
        for (float& x : weight)  // one that attended to nothing, or is not there, does not count, whatever its output is
          x = lse == -infinity() ? -1.0f : sizeof(Partial) == 2 ? x * of_lane : of_lane;
      }
#pragma unroll
      for (int j = 0; j < Config::kAtOnce; j++) {
        if (at + (j << groups_per_row_shift) >= slots.count) break;
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
          if (kLanes * i * kPerVector >= columns) break;
          const float x = __shfl_sync(0xffffffffu, weight[i * Config::kWeights / kVectors], turn + j, kLanes);
          if (!(x < 0.0f)) add<Partial>(acc + kPerVector * i, v[j][i], x);
        }
      }
    }

    if constexpr (Config::kResults == 2) {  // both groups have the same top
      sum += __shfl_xor_sync(0xffffffffu, sum, kLanes);
#pragma unroll
      for (int k = 0; k < kSums; k++) acc[k] += __shfl_xor_sync(0xffffffffu, acc[k], kLanes);
    }
    const int first_warp = warp - warp_of_row;  // of the row
    float of_warp = 1.0f;                 // lane i: what the sums of the row's warp i count
    if (warps_per_row > 1) {
      if (lane_of_warp == 0) {
        shared.top[warp] = top;
        shared.sum[warp] = sum;
      }
#pragma unroll
      for (int k = 0; k < kSums; k += 4)
        *reinterpret_cast<float4*>(shared.acc[warp] + kPerVector * (kLanes * (k / kPerVector) + lane) + k % kPerVector) =
            make_float4(acc[k], acc[k + 1], acc[k + 2], acc[k + 3]);
      __syncthreads();
      const int other = first_warp + (lane_of_warp & (warps_per_row - 1));
      const float of_lane = shared.top[other];
      top = max_of_lanes(of_lane, warps_per_row);
      of_warp = weight_of(of_lane, top);
      sum = sum_of_lanes(shared.sum[other] * of_warp, warps_per_row);
    }
    const float lse_log2 = top + ptx::lg2_approx_ftz(sum);
    if (lane == 0 && warp_of_row == 0 && first_col == 0 && row < rows) *lse_at = lse_log2 * kLn2;
    const float scale = sum == 0.0f ? 0.0f : 1.0f / (sum + sum * ptx::ex2_approx_ftz(sink - lse_log2));
    if (warps_per_row == 1) {
#pragma unroll
      for (int k = 0; k < kSums; k += 4) {
        const int col = first_col + kPerVector * (kLanes * (k / kPerVector) + lane) + k % kPerVector;
        if (col < min(first_col + columns, params.d_v) && row < rows)
          store4<Element>(dst + col, make_float4(acc[k] * scale, acc[k + 1] * scale, acc[k + 2] * scale, acc[k + 3] * scale));
      }
      continue;
    }
#pragma unroll 1
    for (int col = 64 * warp_of_row; col < columns; col += 64 << warps_shift) {
      const int mine = col + 2 * lane_of_warp;
      float2 all = make_float2(0.0f, 0.0f);
#pragma unroll 2
      for (int i = 0; i < warps_per_row; i++) {
        const float2 x = *reinterpret_cast<const float2*>(shared.acc[first_warp + i] + mine);
        const float of_i = __shfl_sync(0xffffffffu, of_warp, i);
        all.x += of_i * x.x;
        all.y += of_i * x.y;
      }
      if (first_col + mine < params.d_v && row < rows) store2<Element>(dst + first_col + mine, all.x * scale, all.y * scale);
    }
    __syncthreads();  // before the next row takes its place
  }
}

template <class Config>
__device__ __forceinline__ void kernel(const CombineParams& params) {
  ptx::griddepcontrol_launch_dependents();
  const bool direct = params.metadata == nullptr;
  const int most = direct ? 1 : min(params.num_sm_parts - 1, params.batch);  // split requests
  bool waited = false;
#pragma unroll 1
  for (int n = direct ? 0 : blockIdx.y; n < most; n += gridDim.y) {
    int req = 0;
    Slots slots{params.n_direct, 0, 0, 1};
    if (!direct) {
      const SplitRequest split = nth_split_request(params, n);
      if (split.part < 1) break;
      req = min(max(split.req, 0), params.batch - 1);
      slots = {split.fragments, 2 * split.part - 1, 2 * split.part - 2, 2};
    }
    merge<Config>(params, req, slots, waited);
  }
  if (!waited) ptx::griddepcontrol_wait();
}

}  // namespace flashmla::combine
