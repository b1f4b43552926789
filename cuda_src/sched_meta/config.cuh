// Sizes of the tile scheduler. One CTA does the whole plan, so every limit here is a limit of one thread block.
#pragma once
#include "common/types.cuh"

namespace flashmla::sched_meta {

template <int kThreads, int kMaxParts>
struct SharedStorage {
  static constexpr int kRequests = 8192;  // batches up to this size keep their prefix sum on chip

  int64_t part_position[kMaxParts + 1];  // where a part begins on the line of costs
  int64_t warp_cost[kThreads / 32];      // cost of the requests of a warp
  int32_t cost_prefix[kRequests + 1];    // exclusive prefix sum of the costs; unused when it lives in global memory
  int32_t part_request[kMaxParts + 1];   // request in which a part begins; `batch` for a part without work
  int32_t part_block[kMaxParts + 1];     // block of part_request at which it begins
  int32_t part_cuts[kMaxParts + 1];      // parts up to and including this one that begin inside a request
  int32_t warp_cuts[kThreads / 32];      // parts of a warp that begin inside a request
};

struct Config {
  static constexpr int kThreads = 1024;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterX = 1;
  static constexpr int kMaxParts = 512;
  using Shared = SharedStorage<kThreads, kMaxParts>;
  static constexpr int kSmemBytes = sizeof(Shared);

  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, one CTA; one warp scans the sums of all warps");
  static_assert(kMaxParts < kThreads, "one thread per part, and one for the end of the last part");
  static_assert(kSmemBytes <= 48 * 1024, "no opt-in to more shared memory");
};

}  // namespace flashmla::sched_meta
