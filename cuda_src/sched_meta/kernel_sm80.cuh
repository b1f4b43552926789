// Tile scheduler: spreads the KV blocks of all requests over num_sm_parts parts of about equal cost.
// flashmla_cupy/reference/sched_meta.py states the rule and is bit-identical; this is how it is computed fast.
//
// Requests lie one behind the other on a line of costs (blocks + overhead each); cost_prefix holds the boundaries.
// With stride = ceil(total / parts), or a little more that keeps equal requests whole, a part that begins at x ends at the
// last boundary in [x + stride, x + stride + overhead] if there is one, else it cuts a request at x + stride. So from one
// boundary at which a part begins to the next, the begins are an arithmetic progression, and where it ends is found
// without walking the parts: boundary b is first within reach of step s = ceil((b - x - overhead) / stride), and ends the
// progression iff b >= x + s * stride.
// One warp tests 32 boundaries at a time; a request that fills a hundred parts costs no more than one that fills two.
//
// Grid 1, block Config::kThreads, no cluster; dynamic shared memory Config::kSmemBytes.
// Roles: all warps - costs and their prefix sum (kernel); warp 0 - where the parts begin (walk_parts); one thread per
// part - its row of metadata, then all threads - num_splits (store_plan). metadata must be 16-byte aligned.
#pragma once
#include "common/check.cuh"
#include "common/params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "sched_meta/config.cuh"

namespace flashmla::sched_meta {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
inline constexpr int kWholeBlocks = 16, kWholeShare = 16;  // whole requests may make parts longer by 16 blocks and a 16th

template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, value, offset);
    if (lane >= offset) value += before;
  }
  return value;
}

// Exact division of non-negative numbers by a fixed divisor: the high product is the quotient or one less.
template <class T>
struct Divider;

template <>
struct Divider<int32_t> {
  int32_t divisor;
  uint32_t magic;
  __device__ explicit Divider(int32_t d) : divisor(d), magic(0xffffffffu / uint32_t(d)) {}
  __device__ int32_t operator()(int32_t n) const {
    int32_t quotient = int32_t(__umulhi(uint32_t(n), magic));
    return quotient + (n - quotient * divisor >= divisor);
  }
};

template <>
struct Divider<int64_t> {
  int64_t divisor;
  uint64_t magic;
  __device__ explicit Divider(int64_t d) : divisor(d), magic(0xffffffffffffffffull / uint64_t(d)) {}
  __device__ int64_t operator()(int64_t n) const {
    int64_t quotient = int64_t(__umul64hi(uint64_t(n), magic));
    return quotient + (n - quotient * divisor >= divisor);
  }
};

// Boundaries of the requests on the line of costs, in shared (int32_t) or global memory (int64_t).
template <class T>
struct Boundaries {
  const T* prefix;  // (batch + 1), strictly increasing, prefix[0] == 0
  int32_t batch;

  __device__ T total() const { return prefix[batch]; }

  // Last request that begins at or before `position`; `batch` for the total.
  __device__ int32_t request_at(T position) const {
    int32_t low = 0, high = batch + 1;  // prefix[low] <= position < prefix[high]
#pragma unroll 1
    while (high - low > 1) {
      int32_t middle = (low + high) / 2;
      (prefix[middle] <= position ? low : high) = middle;
    }
    return low;
  }

  // First index in [low, batch] with prefix[index] >= position, `batch` if there is none. By a whole warp.
  __device__ int32_t first_from(int32_t low, T position, int lane) const {
    int32_t high = batch;
    while (low < high) {
      int32_t slice = (high - low + 31) / 32;
      int32_t probe = min(low + (lane + 1) * slice - 1, high);
      int32_t slices_below = __popc(__ballot_sync(kFullWarp, prefix[probe] < position));
      low = min(low + slices_below * slice, high);
      high = min(low + slice - 1, high);
    }
    return high;
  }
};

// What every part but the last advances by at least. `uniform`: all requests cost the same; they stay whole where that
// costs little.
template <class T>
__device__ T stride_of(T total, int32_t batch, int32_t num_parts, bool uniform) {
  const T stride = max((total + num_parts - 1) / num_parts, T(1));
  const T whole = (batch + num_parts - 1) / num_parts * (total / batch), more = whole - stride;
  return uniform && more > 0 && more <= kWholeBlocks && more * kWholeShare <= stride ? whole : stride;
}

// Begins of parts, `stride` apart until the progression ends at a boundary.
template <class T>
struct Progression {
  static constexpr T kNever = sizeof(T) == 4 ? T(0x7fffffff) : T(0x7fffffffffffffffll);
  T overhead, stride;
  Divider<T> per_stride;

  __device__ Progression(T stride_, T overhead_) : overhead(overhead_), stride(stride_), per_stride(stride) {}

  // First step, at least 1, whose reach step * stride + overhead includes `distance`.
  __device__ int32_t steps(T distance) const {
    return int32_t(per_stride(max(distance + stride - 1 - overhead, stride)));
  }

  // Whether that step ends at the boundary `distance` ahead: less than `slack_limit` of its reach lies behind it.
  __device__ bool ends(T distance, int32_t steps, T slack_limit) const {
    return distance > 0 && steps * stride + overhead - distance < slack_limit;
  }
};

// Warp 0: writes where each part begins, and the total behind the last part with work.
// `uniform`: all requests cost the same.
template <class T>
__device__ void walk_parts(Boundaries<T> boundaries, const Progression<T>& progression, int32_t num_parts, bool uniform,
                           int64_t* part_position, int lane) {
  constexpr T kNever = Progression<T>::kNever;
  const T overhead = progression.overhead, stride = progression.stride;
  const int32_t batch = boundaries.batch;
  const T total = boundaries.total();

  T position = 0;  // a boundary at which `part` begins
  int32_t part = 0;
  int32_t window = 1;    // this lane looks at boundary window + lane
  T first_end = stride;  // no boundary before this one can end the progression

  while (position < total) {
    if (boundaries.prefix[min(window + 31, batch)] < first_end) {
      window = boundaries.first_from(min(window + 32, batch), first_end, lane);
    }
    const int32_t index = min(window + lane, batch);
    const T boundary = boundaries.prefix[index];
    // A progression ends at the last boundary within reach, and at the end of all work in any case.
    const T slack_limit = index < batch ? min(overhead + 1, boundaries.prefix[index + 1] - boundary) : kNever;

    // Requests that would end a progression begun at their own start. Where one follows the end of a progression, so
    // does its end; a run of them is settled at once.
    const T cost = boundary - boundaries.prefix[index - 1];
    const int32_t own_steps = progression.steps(cost);
    const bool ends_alone = window + lane <= batch && progression.ends(cost, own_steps, slack_limit);
    const uint32_t alone_mask = __ballot_sync(kFullWarp, ends_alone);
    const int32_t own_steps_sum = warp_inclusive_sum(own_steps, lane);

    int32_t steps;  // first step whose reach includes this lane's boundary
    while (true) {
      steps = progression.steps(boundary - position);
      const bool ends = progression.ends(boundary - position, steps, slack_limit);
      const uint32_t ends_mask = __ballot_sync(kFullWarp, ends);
      if (ends_mask == 0) break;
      const int end_lane = __ffs(ends_mask) - 1;
      const int32_t parts = __shfl_sync(kFullWarp, steps, end_lane);

      if (uniform) {  // the first progression repeats
        const T period_cost = (window + end_lane) * (total / batch);
#pragma unroll 1
        for (int32_t p = lane; p < num_parts; p += 32) {
          const T base = p / parts * period_cost, begin = base + p % parts * stride;
          const bool beyond = begin >= total || (begin > base && begin + overhead >= total);
          part_position[p] = beyond ? total : begin;
        }
        part = num_parts;
        position = total;
        break;
      }

#pragma unroll 1
      for (int32_t step = lane; step < parts; step += 32) part_position[part + step] = position + step * stride;
      part += parts;
      const int last_lane = end_lane + __ffs(~(alone_mask >> end_lane >> 1)) - 1;
      const int32_t sum_before = __shfl_sync(kFullWarp, own_steps_sum, end_lane);
      if (lane > end_lane && lane <= last_lane) {
        const int32_t own_part = part + own_steps_sum - own_steps - sum_before;
#pragma unroll 1
        for (int32_t step = 0; step < own_steps; ++step) {
          part_position[own_part + step] = boundary - cost + step * stride;
        }
      }
      part += __shfl_sync(kFullWarp, own_steps_sum, last_lane) - sum_before;
      position = __shfl_sync(kFullWarp, boundary, last_lane);
      if (position == total) break;
    }
    window += 32;
    first_end = position + __shfl_sync(kFullWarp, steps, 31) * stride;
  }
#pragma unroll 1
  for (int32_t p = part + lane; p <= num_parts; p += 32) part_position[p] = total;
}

// Positions -> rows of metadata and num_splits. All threads.
template <class Config, class T>
__device__ void store_plan(const SchedMetaParams& params, typename Config::Shared& shared, Boundaries<T> boundaries,
                           T stride) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int32_t batch = params.batch, num_parts = params.num_sm_parts;

  int32_t request = batch;
  int32_t block = 0;
  if (thread <= num_parts) {
    const T position = T(shared.part_position[thread]);
    request = boundaries.request_at(position);
    block = int32_t(position - boundaries.prefix[request]);
    shared.part_request[thread] = request;
    shared.part_block[thread] = block;
  }
  const uint32_t warp_cut = __ballot_sync(kFullWarp, block > 0);
  if (lane == 0) shared.warp_cuts[warp] = __popc(warp_cut);
  __syncthreads();

  const int32_t cuts_of_lower_warps = __reduce_add_sync(kFullWarp, lane < warp ? shared.warp_cuts[lane] : 0);
  if (thread <= num_parts) {
    shared.part_cuts[thread] = cuts_of_lower_warps + __popc(warp_cut & (kFullWarp >> (31 - lane)));
  }
  if (thread < num_parts) {
    int4 begin_end = {batch, 0, batch, 0}, splits = {0, 0, 0, 0};
    if (request < batch) {
      const int32_t next_request = shared.part_request[thread + 1];
      const int32_t next_block = shared.part_block[thread + 1];
      const bool begin_cut = block > 0, end_cut = next_block > 0;
      const int32_t end_request = end_cut ? next_request : next_request - 1;
      const T end_cost = boundaries.prefix[end_request + 1] - boundaries.prefix[end_request];
      const int32_t end_block = end_cut ? next_block : int32_t(end_cost - params.overhead_blocks);
      const bool alone = request == end_request;
      begin_end = {request, block, end_request, end_block};
      // Between its first and its last fragment a request is cut every `stride` blocks, first at most `stride` in.
      splits.x = int32_t((T(block) + stride - 1) / stride);
      splits.y = begin_cut || (alone && end_cut);
      splits.z = end_cut || (alone && begin_cut);
    }
    int4* row = reinterpret_cast<int4*>(params.metadata) + 2 * thread;
    row[0] = begin_end;
    row[1] = splits;
  }
  __syncthreads();

  // num_splits[i] = i + cuts inside requests before i; part 0 begins at request 0 and cuts nothing.
#pragma unroll 1
  for (int32_t i = thread; i <= batch; i += Config::kThreads) {
    int32_t low = 0, high = num_parts + 1;  // part_request[low] < i <= part_request[high]
#pragma unroll 1
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (shared.part_request[middle] < i ? low : high) = middle;
    }
    params.num_splits[i] = i + shared.part_cuts[low];
  }
}

template <class Config, class T>
__device__ void plan(const SchedMetaParams& params, typename Config::Shared& shared, const T* prefix, bool uniform) {
  const Boundaries<T> boundaries{prefix, params.batch};
  const T stride = stride_of(boundaries.total(), params.batch, params.num_sm_parts, uniform);
  const Progression<T> progression(stride, params.overhead_blocks);
  if (threadIdx.x < 32) {
    walk_parts<T>(boundaries, progression, params.num_sm_parts, uniform, shared.part_position, threadIdx.x);
  }
  __syncthreads();
  store_plan<Config, T>(params, shared, boundaries, stride);
}

template <class Config>
__device__ void kernel(const SchedMetaParams& params) {
  using Shared = typename Config::Shared;
  constexpr int kWarps = Config::kThreads / 32;
  extern __shared__ __align__(16) uint8_t smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int32_t batch = params.batch;
  FLASHMLA_ASSERT(params.num_sm_parts >= 1 && params.num_sm_parts <= Config::kMaxParts && params.overhead_blocks >= 1);

  // Each warp owns a run of whole 32-request tiles.
  const int32_t tiles = ((batch + 31) / 32 + kWarps - 1) / kWarps;
  const int32_t begin = min(warp * tiles * 32, batch), end = min(begin + tiles * 32, batch);
  auto cost_of = [&](int32_t request) -> int64_t {
    const int32_t length = params.fixed_seqlen >= 0 ? params.fixed_seqlen : max(params.cache_seqlens[request], 0);
    const uint32_t tokens = uint32_t(length), block_size = uint32_t(params.block_size);
    return int64_t(tokens / block_size) + (tokens % block_size != 0) + params.overhead_blocks;
  };

  ptx::griddepcontrol_wait();  // whoever wrote the lengths, or still reads the last plan
  ptx::griddepcontrol_launch_dependents();

  int64_t lane_cost = 0;
  for (int32_t request = begin + lane; request < end; request += 32) lane_cost += cost_of(request);
  const int64_t warp_sum = warp_inclusive_sum(lane_cost, lane);
  if (lane == 31) shared.warp_cost[warp] = warp_sum;
  __syncthreads();
  const int64_t sums = warp_inclusive_sum(lane < kWarps ? shared.warp_cost[lane] : 0, lane);
  const int64_t total = __shfl_sync(kFullWarp, sums, 31);
  const int64_t lower_warps = __shfl_sync(kFullWarp, sums, max(warp - 1, 0));

  const bool on_chip = batch <= Shared::kRequests && total < (1 << 29);  // 2 * total + overhead fits int32
  bool uniform = true;
  int64_t base = warp > 0 ? lower_warps : 0;
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += 32) {
    const int32_t request = tile + lane;
    int64_t cost = lane_cost, sum = warp_sum;  // right for the only tile of a warp
    if (tiles > 1) {
      cost = request < end ? cost_of(request) : 0;
      sum = warp_inclusive_sum(cost, lane);
    }
    if (request < end) {
      uniform &= cost * batch == total;
      if (on_chip) {
        shared.cost_prefix[request + 1] = int32_t(base + sum);
      } else {
        params.cost_prefix[request + 1] = base + sum;
      }
    }
    base += __shfl_sync(kFullWarp, sum, 31);
  }
  if (thread == 0) {
    if (on_chip) {
      shared.cost_prefix[0] = 0;
    } else {
      params.cost_prefix[0] = 0;
    }
  }
  uniform = __syncthreads_and(uniform);

  if (on_chip) {
    plan<Config, int32_t>(params, shared, shared.cost_prefix, uniform);
  } else {
    plan<Config, int64_t>(params, shared, params.cost_prefix, uniform);
  }
}

}  // namespace flashmla::sched_meta
