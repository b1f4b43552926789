// What one SM part works on, read from the tile-scheduler metadata (see sched_meta). The plan is taken as a hint: cuts
// are clipped to the real lengths and the last fragment of a request runs to its real end, so metadata made for other
// lengths still covers every block exactly once and never leaves the cache.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

namespace flashmla::attention {

constexpr int kKvBlock = 64;  // tokens of a KV block, the unit of the plan

struct PartPlan {
  int part;
  int begin_req, begin_block;
  int end_req, end_block;
  bool begins_inside;  // begin_req was begun by an earlier part
  bool ends_inside;    // end_req goes on in the next part
  int last_token;      // the last query token among the CTA's rows; the caller sets it
};

__device__ __forceinline__ PartPlan load_part_plan(const int32_t* metadata, int part, int num_sm_parts, int batch) {
  const auto row = [&](int of_part) { return reinterpret_cast<const int4*>(metadata + of_part * 8); };
  const bool is_last = part + 1 == num_sm_parts;
  const int4 a = row(part)[0], b = row(part)[1];  // begin_req begin_block end_req end_block | begin_split ...
  const int4 next_a = row(part + !is_last)[0], next_b = row(part + !is_last)[1];
  PartPlan plan;
  plan.part = part;
  plan.begin_req = max(a.x, 0);
  plan.begin_block = max(a.y, 0);
  plan.end_req = min(a.z, batch - 1);
  plan.end_block = max(a.w, 0);
  plan.begins_inside = b.x > 0;
  plan.ends_inside = !is_last && next_a.x == a.z && next_b.x > 0;
  return plan;
}

// Without metadata nothing is cut: each part has as many whole requests. The caller sets last_token.
__device__ __forceinline__ PartPlan whole_part_plan(int part, int num_sm_parts, int batch) {
  const int requests = ceil_div(batch, num_sm_parts);
  return {part, part * requests, 0, min((part + 1) * requests, batch) - 1, 0, false, false, 0};
}

struct BlockPosition {
  int req, block, end_block;
};

struct Fragment {
  int seqlen;                  // tokens of the request
  int begin_block, end_block;  // KV blocks of this fragment; empty when equal
  int slot;                    // row of the partial results, or -1: the request is whole and written out directly
};

// Whether an earlier part has begun the request, and whether a later one goes on with it.
__device__ __forceinline__ bool is_continued(const PartPlan& plan, int req) {
  return plan.begins_inside && req == plan.begin_req;
}
__device__ __forceinline__ bool is_cut(const PartPlan& plan, int req) { return plan.ends_inside && req == plan.end_req; }

// Row of the partial results of a fragment, or -1: the request is whole.
__device__ __forceinline__ int slot_of(const PartPlan& plan, int req) {
  const bool continued = is_continued(plan, req);
  return continued || is_cut(plan, req) ? 2 * plan.part + (continued ? 0 : 1) : -1;
}

// `visible` bounds the tokens that any row of the caller's tile may see (causal); `max_seqlen` what the cache holds.
__device__ __forceinline__ Fragment fragment_of(const PartPlan& plan, int req, int seqlen, int visible) {
  const int blocks = ceil_div(seqlen, kKvBlock);
  Fragment f;
  f.seqlen = seqlen;
  f.begin_block = min(is_continued(plan, req) ? plan.begin_block : 0, blocks);
  f.end_block = min(is_cut(plan, req) ? plan.end_block : blocks, ceil_div(max(visible, 0), kKvBlock));
  f.end_block = max(f.begin_block, min(f.end_block, blocks));
  f.slot = slot_of(plan, req);
  return f;
}

}  // namespace flashmla::attention
