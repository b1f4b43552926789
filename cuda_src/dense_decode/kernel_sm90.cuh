// Paged dense MLA decode on Hopper: out = softmax(scale Q K^T) V, where V is the first 512 dims of K.
//
// Method: FlashMLA's split-KV plan (a scheduler hands every SM part a range of KV blocks); inside a CTA a pipeline of
// our own rather than FlashMLA's seesaw. One warpgroup only computes scores, with most of Q held as register operands;
// that leaves shared memory for three KV stages. Two warpgroups only accumulate, each one half of the 512 output dims.
//
// grid    (ceil(rows / 64), h_kv, num_sm_parts), rows = s_q * h_q / h_kv: CTAs sharing KV are neighbours
// block   384 threads, one CTA an SM, no cluster; 184 registers a thread for scores, 160 for output
// roles   warpgroup 0  scores: S = Q K^T, softmax, P to shared memory, row sums, log-sum-exp
//         warpgroup 1  output half 0: O[:, 0:256] += P V      warpgroup 2  output half 1: O[:, 256:512] += P V
//         One elected lane of each output warp loads: warp w of half h tile 4 h + w of K, into the stage that its own
//         warpgroup leaves as it begins the next block; warp 2 of half 1 also the RoPE tile, once both have left the stage.
// order   The halves are told of P (n) only when Q K^T (n + 1) is nearly done, and keep the tensor cores busy while the score
//         warpgroup is at its softmax of n + 1.
// P (n) takes the place of the RoPE tile of its stage, which Q K^T (n) was the last to read.
//
// barrier            arrivals     bytes        armed by         waited on by
// half_full[h][s][t] 1 + TMA      8192 or less half h           scores, half h     tile t of half h has landed in stage s
// rope_full[s]       1 + TMA      8192 or less half 1           scores             the RoPE tile has landed in stage s
// half_empty[h][s]   4 (warps)    -            half h           half h, half 1     P V of the block in stage s is done, and partial
//                                                                                  results that went by way of it are copied
// p_full             4 (warps)    -            scores           both halves        p, rescale(s), inv_sum may be read
// p_empty            8 (warps)    -            both halves      scores             rescale(s), inv_sum have been read
#pragma once
#include "attention/epilogue.cuh"
#include "attention/half_partial.cuh"
#include "attention/online_softmax.cuh"
#include "attention/output_tile.cuh"
#include "attention/split.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "dense_decode/config.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_global.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::dense_decode {

using attention::BlockPosition;
using attention::Fragment;
using attention::PartPlan;
using tile::arrive_once_per_warp;
using tile::smem_addr;

constexpr uint32_t kScoreBarrier = 1;   // named barriers, one a warpgroup
constexpr uint32_t kOutputBarrier = 2;  // + half

// The query token and the head of a row; rows are (token, head of the KV head's group).
__device__ __forceinline__ int row_token(const DenseDecodeParams& params, int row) {
  return divide_by_magic(row, params.heads_per_kv_magic, params.heads_per_kv_shift);
}
__device__ __forceinline__ int row_head(const DenseDecodeParams& params, int row, int token) {
  return blockIdx.y * params.heads_per_kv + row - token * params.heads_per_kv;
}

// Causal: the number of tokens a query row sees. Query token i of s_q sees seqlen - s_q + i + 1.
__device__ __forceinline__ int visible_tokens(const DenseDecodeParams& params, int seqlen, int row) {
  return params.causal ? seqlen - params.s_q + row_token(params, row) + 1 : seqlen;
}

// The fragment of a request that this CTA works on. Every role derives the same sequence of blocks from it.
__device__ __forceinline__ Fragment load_fragment(const DenseDecodeParams& params, const PartPlan& plan, int req) {
  const int seqlen = min(max(__ldg(params.cache_seqlens + req), 0), params.max_seqlen);
  const int visible = params.causal ? seqlen - params.s_q + plan.last_token + 1 : seqlen;
  return attention::fragment_of(plan, req, seqlen, min(visible, seqlen));
}

// ---- loads ------------------------------------------------------------------------------------------------------
// Walks over the KV blocks of this CTA, in order, across requests.
__device__ __forceinline__ void skip_finished(const DenseDecodeParams& params, const PartPlan& plan,
                                              BlockPosition& at) {
  while (at.block >= at.end_block && ++at.req <= plan.end_req) {
    const Fragment fragment = load_fragment(params, plan, at.req);
    at.block = fragment.begin_block;
    at.end_block = fragment.end_block;
  }
}

__device__ __forceinline__ void first_block(const DenseDecodeParams& params, const PartPlan& plan, BlockPosition& at) {
  at = {plan.begin_req - 1, 0, 0};
  skip_finished(params, plan, at);
}

__device__ __forceinline__ void next_block(const DenseDecodeParams& params, const PartPlan& plan, BlockPosition& at) {
  at.block++;
  skip_finished(params, plan, at);
}

// Page of a token and the token's place in it. A cache without a block table has one page a request.
struct PageToken {
  int page, token;
};
__device__ __forceinline__ const int32_t* table_entry(const DenseDecodeParams& params, int req, int token) {
  const int page_shift = 31 - __clz(params.page_size);  // page sizes are powers of two
  return params.block_table + req * params.block_table_stride + (token >> page_shift);
}
__device__ __forceinline__ PageToken locate(const DenseDecodeParams& params, int req, int token) {
  if (params.block_table == nullptr) return {req, token};
  return {__ldg(table_entry(params, req, token)), token & (params.page_size - 1)};
}

// How many boxes make a tile of a KV block: several where pages are small, but none that is wholly past the end.
__device__ __forceinline__ int boxes_of(const DenseDecodeParams& params, const BlockPosition& at) {
  if (params.box_tokens >= attention::kKvBlock) return 1;
  const int seqlen = min(__ldg(params.cache_seqlens + at.req), params.max_seqlen);
  return ceil_div(min(attention::kKvBlock, seqlen - at.block * attention::kKvBlock), params.box_tokens);
}

// Starts the copy of tile `tile_index` (64 dims) of a KV block; `first` locates its first token. One thread.
__device__ __forceinline__ void load_tile(const DenseDecodeParams& params, const BlockPosition& at, PageToken first, int boxes,
                                          uint32_t dst, uint32_t full, int tile_index, bool evict_first) {
  const int first_token = at.block * attention::kKvBlock;
  const uint32_t box_bytes = params.box_tokens * tile::kTileRowBytes;
  const auto next_box = [&](int box) {
    if (box > 0) first = locate(params, at.req, first_token + box * params.box_tokens);
  };
  if (evict_first) {  // outside of the loop, for one uniform branch less in it
#pragma unroll 1
    for (int box = 0; box < boxes; box++) {
      next_box(box);
      ptx::cp_async_bulk_tensor_5d_evict_first(dst + box * box_bytes, &params.k_map, full, 0, first.token, tile_index, blockIdx.y,
                                               first.page);
    }
    return;
  }
#pragma unroll 1
  for (int box = 0; box < boxes; box++) {
    next_box(box);
    ptx::cp_async_bulk_tensor_5d(dst + box * box_bytes, &params.k_map, full, 0, first.token, tile_index, blockIdx.y, first.page);
  }
}

// ---- scores -----------------------------------------------------------------------------------------------------
// A query row in global memory; rows past the last one give the last.
template <class Element>
__device__ __forceinline__ const Element* query_row(const DenseDecodeParams& params, int req, int row) {
  row = min(row, params.s_q * params.heads_per_kv - 1);
  const int token = row_token(params, row), head = row_head(params, row, token);
  return reinterpret_cast<const Element*>(params.q) + req * params.q_stride_batch + token * params.q_stride_token +
         head * params.q_stride_head;
}

// Q of one request: the first kQRegSteps x 16 dims as wgmma A fragments, the rest in shared memory. A warp loads its 16 rows as
// they lie in memory, all at once, and takes them apart by way of its part of the RoPE tile, 64 dims at a time. It is little
// code: a CTA that has one request runs it once, and then fetching instructions is most of its time. Rows past the last are
// zero: multiplying zeros takes the least power, and the clock of a loaded chip follows its power.
template <class Config>
__device__ __forceinline__ void load_query(const DenseDecodeParams& params, int req, typename Config::Storage& smem,
                                           uint32_t (&q)[Config::kQRegSteps][4]) {
  using Element = typename Config::Element;
  const int first_row = blockIdx.x * Config::kRows, rows = params.s_q * params.heads_per_kv;
  const int lane = ptx::tid_x() % 32, warp_row = ptx::tid_x() / 32 * 16, column = lane % 8;
  uint4 chunk[4][Config::kTiles];  // of row lane / 8 + 4 i, the 16 bytes of a column of each tile
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = first_row + warp_row + lane / 8 + 4 * i;
    const uint4* src = reinterpret_cast<const uint4*>(query_row<Element>(params, req, row)) + column;
#pragma unroll
    for (int t = 0; t < Config::kTiles; t++) chunk[i][t] = ptx::ld_global_nc_v4(src + 8 * t);
  }
  ptx::bar_sync(kScoreBarrier, 128);  // every warp is done with the previous request's tiles
  const uint32_t staged = smem_addr(smem.q_rope) + tile::swizzle_128b(warp_row + lane / 8, column);  // and, of i odd, ^ 64
  const uint32_t fragments = smem_addr(smem.q_rope) + tile::swizzle_128b(warp_row + lane % 16, lane / 16);
  const auto store = [&](int i, uint4 v, bool piece) {
    ptx::st_shared_v4((staged ^ i % 2 * 64) + 4 * i * tile::kTileRowBytes, v);
    if (piece && column >= 6)
      ptx::st_shared_v4(smem_addr(smem.q_piece) + tile::swizzle_32b(warp_row + lane / 8 + 4 * i, column - 6), v);
  };
  const int rows_left = rows - first_row - warp_row - lane / 8;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (rows_left <= 4 * i) store(i, make_uint4(0, 0, 0, 0), true);
#pragma unroll
  for (int t = 0; t < Config::kTiles; t++) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (rows_left > 4 * i) store(i, chunk[i][t], t == 7);
    if (t == 8) break;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (4 * t + k < Config::kQRegSteps) ptx::ldmatrix_x4(fragments ^ 32 * k, q[4 * t + k]);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(kScoreBarrier, 128);
}

// S = Q K^T for one block; tiles are used as they land. Two commit groups: all tiles but the last, and the last.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[32], const uint32_t (&q)[Config::kQRegSteps][4],
                                             typename Config::Storage& smem,
                                             const tile::RingPosition<Config::kStages>& ring) {
  using Element = typename Config::Element;
#pragma unroll
  for (int t = 0; t < Config::kTiles; t++) {
    const bool rope = t == 8;
    const int half = rope ? 0 : t / 4;
    tile::wait(smem_addr(rope ? &smem.rope_full[ring.stage] : &smem.half_full[half][ring.stage][t % 4]), ring.phase);
    ptx::wgmma_fence();
    if (t == Config::kTiles - 1) ptx::wgmma_commit_group();
    const auto* k = rope ? smem.rope_or_p[ring.stage] : smem.k_half[half][ring.stage][t % 4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint64_t b = tile::advance(tile::k_major_desc(smem_addr(k)), i * tile::kKMajorStepBytes);
      const int step = 4 * t + i;
      if (step < Config::kQRegSteps) {
        ptx::wgmma_m64n64k16_rs<Element>(s, q[step < Config::kQRegSteps ? step : 0], b, step > 0);
      } else if (rope) {
        const uint64_t a = tile::advance(tile::k_major_desc(smem_addr(smem.q_rope)), i * tile::kKMajorStepBytes);
        ptx::wgmma_m64n64k16_ss<Element>(s, a, b, 1);
      } else {
        ptx::wgmma_m64n64k16_ss<Element>(s, tile::k_major_desc_32b(smem_addr(smem.q_piece)), b, 1);
      }
    }
  }
  ptx::wgmma_commit_group();
}

// Log-sum-exp of one row: natural log into lse, or log2 into the partial results.
__device__ __forceinline__ void store_lse(const DenseDecodeParams& params, int slot, int req, int row, float lse_log2) {
  const int rows = params.s_q * params.heads_per_kv;
  if (row >= rows || (threadIdx.x & 3) != 0) return;
  if (slot >= 0) {
    params.lse_partial[((int64_t)slot * params.h_kv + blockIdx.y) * rows + row] = lse_log2;
  } else {
    const int token = row_token(params, row), head = row_head(params, row, token);
    params.lse[req * params.lse_stride_batch + head * params.lse_stride_head + token * params.lse_stride_token] =
        lse_log2 * kLn2;
  }
}

// Tokens past the end, and past what each row may see. Everything is derived again here: it happens once or twice a
// request, and registers are scarce.
__device__ __forceinline__ void mask_scores(const DenseDecodeParams& params, const PartPlan& plan, int req, int block,
                                            float (&s)[32]) {
  const int seqlen = load_fragment(params, plan, req).seqlen;
  const int row = blockIdx.x * 64 + tile::fragment_row();
  attention::mask_columns(s, block * attention::kKvBlock, min(visible_tokens(params, seqlen, row), seqlen),
                          min(visible_tokens(params, seqlen, row + 8), seqlen));
}

// Registers are scarce here (Q takes 124 of 184): what the loop over blocks does not need every time is derived again.
template <class Config>
__device__ __forceinline__ void compute_scores(const DenseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  const int first_row = blockIdx.x * Config::kRows;
  tile::RingPosition<Config::kStages> k_ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  uint32_t q[Config::kQRegSteps][4];
  float s[32];
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int block, end_block, unmasked_blocks;
    {
      const Fragment fragment = load_fragment(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
      unmasked_blocks = visible_tokens(params, fragment.seqlen, first_row) / Config::kBlock;
    }
    if (block < end_block) load_query<Config>(params, req, smem, q);
    // Rows past the last get an infinite maximum: their probabilities are zero, like their queries.
    const int rows = params.s_q * params.heads_per_kv, row = first_row + tile::fragment_row_again();
    attention::RowState state0{row < rows ? attention::kNothing : infinity(), 0.0f};
    attention::RowState state1{row + 8 < rows ? attention::kNothing : infinity(), 0.0f};
    bool pending = false;  // P of the block before is not announced yet
    for (; block < end_block; block++) {
      issue_scores<Config>(s, q, smem, k_ring);
      if (pending) ptx::fence_proxy_async();  // P of the block before; its latency lies under Q K^T
      ptx::wgmma_wait_group<1>();
      if (pending) arrive_once_per_warp(smem_addr(&smem.p_full));
      ptx::wgmma_wait_group<0>();
      if (block >= unmasked_blocks) mask_scores(params, plan, req, block, s);
      float max0, max1, rescale0, rescale1;
      attention::row_max(s, max0, max1);
      const bool rescales = attention::update_maxima(state0, state1, max0 * params.scale_log2, max1 * params.scale_log2, rescale0,
                                                     rescale1);
      attention::exponentiate(s, params.scale_log2, state0, state1);

      tile::wait(smem_addr(&smem.p_empty), parity ^ 1);
      parity ^= 1;
      ptx::bar_sync(kScoreBarrier, 128);  // no warp's Q K^T reads the RoPE tile any more
      uint32_t p[4][4];
      attention::pack_probabilities<typename Config::Element>(s, p);
      attention::store_probabilities(p, smem_addr(smem.rope_or_p[k_ring.stage]), threadIdx.x % 128);
      k_ring.advance();
      if (tile::lane_id() == 0) smem.rescales[tile::warp_in_group()] = rescales;
      if (rescales || block + 1 == end_block) {
        if ((threadIdx.x & 3) == 0) {
          smem.rescale[tile::fragment_row()] = rescale0;
          smem.rescale[tile::fragment_row() + 8] = rescale1;
        }
        if (block + 1 == end_block) {
          state0.sum = tile::quad_sum(state0.sum);
          state1.sum = tile::quad_sum(state1.sum);
          if ((threadIdx.x & 3) == 0) {
            smem.inv_sum[tile::fragment_row()] = state0.sum == 0.0f ? 0.0f : 1.0f / state0.sum;
            smem.inv_sum[tile::fragment_row() + 8] = state1.sum == 0.0f ? 0.0f : 1.0f / state1.sum;
          }
          ptx::fence_proxy_async();
          arrive_once_per_warp(smem_addr(&smem.p_full));
        }
      }
      pending = true;
    }
    const int slot = load_fragment(params, plan, req).slot;
    store_lse(params, slot, req, row, state0.max_log2 + ptx::lg2_approx_ftz(state0.sum));
    store_lse(params, slot, req, row + 8, state1.max_log2 + ptx::lg2_approx_ftz(state1.sum));
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
// Which half of the output a warp works on; derived again at each use, for the accumulators leave few registers.
__device__ __forceinline__ int output_half() { return ptx::tid_x() / 128 - 1; }

// What a warp of an output warpgroup loads, kStages blocks ahead: tile `warp` of its half of K, and warp 2 of half 1 the
// RoPE tile. The position lives in shared memory because the accumulators leave no registers for it. One elected lane calls
// the loads.
template <class Config>
struct Loader {
  const DenseDecodeParams& params;
  const PartPlan& plan;
  typename Config::Storage& smem;

  __device__ __forceinline__ BlockPosition& next() const { return smem.next[output_half()][tile::warp_in_group()]; }

  __device__ __forceinline__ void begin() const {
    if (ptx::elect_sync()) {
      first_block(params, plan, next());
      for (int stage = 0; stage < Config::kStages; stage++) load(stage, 1, locate_next());
    }
    __syncwarp();
  }
  // Where the next block lies; token -1: there is none.
  __device__ __forceinline__ PageToken locate_next() const {
    if (next().req > plan.end_req) return {0, -1};
    return locate(params, next().req, next().block * Config::kBlock);
  }
  // Into `stage`, once every warp has left it (parity of half_empty). Nothing that can be done before that wait comes after it: the
  // copies, and with them the next block, begin that much later.
  __device__ __forceinline__ void load(int stage, uint32_t empty_parity, PageToken at) const {
    if (at.token < 0) return;
    const int warp = tile::warp_in_group();
    const bool evict_first = smem.reads_little;
    const uint32_t full = smem_addr(&smem.half_full[output_half()][stage][warp]), rope_full = smem_addr(&smem.rope_full[stage]);
    const int boxes = boxes_of(params, next()), bytes = boxes * params.box_tokens * tile::kTileRowBytes;
    const bool rope = Config::kRope && output_half() == 1 && warp == 2;
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    if (rope) ptx::mbarrier_arrive_expect_tx(rope_full, bytes);
    tile::wait(smem_addr(&smem.half_empty[output_half()][stage]), empty_parity);
    load_tile(params, next(), at, boxes, smem_addr(smem.k_half[output_half()][stage][warp]), full, 4 * output_half() + warp,
              evict_first);
    if (rope) {
      tile::wait(smem_addr(&smem.half_empty[0][stage]), empty_parity);
      load_tile(params, next(), at, boxes, smem_addr(smem.rope_or_p[stage]), rope_full, 8, evict_first);
    }
    next_block(params, plan, next());
  }
};

// In the last block of a request, tokens past its end may hold anything, and 0 x NaN is NaN: their rows of V become 0.
__device__ __forceinline__ void zero_tail(const DenseDecodeParams& params, const PartPlan& plan, int req, int block,
                                          uint32_t tiles) {
  const int tokens = load_fragment(params, plan, req).seqlen - block * attention::kKvBlock;
  if (tokens >= attention::kKvBlock) return;
  const int chunks = (attention::kKvBlock - tokens) * 8;  // of 16 bytes, per tile
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < chunks; i += 128)
#pragma unroll
    for (int t = 0; t < 4; t++)
      ptx::st_shared_v4(tiles + tile::kTileBytes * t + tokens * tile::kTileRowBytes + 16 * i, make_uint4(0, 0, 0, 0));
  ptx::fence_proxy_async();
  ptx::bar_sync(kOutputBarrier + output_half(), 128);
}

// Both rows of a thread, divided by their sums; one that attended to nothing becomes 0.
template <class Config>
__device__ __forceinline__ void store_output(const DenseDecodeParams& params, int req, const float (&o)[128], float inv_sum0,
                                             float inv_sum1) {
  using Element = typename Config::Element;
  const int rows = params.s_q * params.heads_per_kv, row0 = blockIdx.x * Config::kRows + tile::fragment_row_again();
  const auto pointer = [&](int row) -> Element* {
    const int token = row_token(params, row), head = row_head(params, row, token);
    Element* out = reinterpret_cast<Element*>(params.out) + req * params.out_stride_batch + token * params.out_stride_token;
    return row < rows ? out + head * params.out_stride_head + 256 * output_half() : nullptr;
  };
  attention::store_row_16bit<Element, 0>(o, inv_sum0, pointer(row0));
  attention::store_row_16bit<Element, 2>(o, inv_sum1, pointer(row0 + 8));
}

// The same as partial results: a warp's 16 rows by the copy engine, by way of its tile of a stage that P V has read, in boxes of
// 128 bytes a row. The copy engine leaves out rows past the last.
template <class Config>
__device__ __forceinline__ void store_partial(const DenseDecodeParams& params, typename Config::Storage& smem, int stage,
                                              int slot, const float (&o)[128], float inv_sum0, float inv_sum1) {
  constexpr int kBoxBytes = 16 * tile::kTileRowBytes, kBoxColumns = tile::kTileRowBytes / (int)sizeof(typename Config::Partial);
  ptx::bar_sync(kOutputBarrier + output_half(), 128);  // every warp's P V has
  const int rows = params.s_q * params.heads_per_kv, lane = ptx::tid_x() % 32;
  const int first_row = blockIdx.x * Config::kRows + ptx::tid_x() % 128 / 32 * 16;
  if (first_row >= rows) return;
  const uint32_t staged = smem_addr(smem.k_half[output_half()][stage][tile::warp_in_group()]);
  const int slot_of_head = slot * params.h_kv + blockIdx.y;
  const auto copy = [&](int first_col) {  // the staged four boxes
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect_sync()) {
#pragma unroll
      for (int box = 0; box < 4; box++)
        ptx::cp_async_bulk_tensor_3d_store(&params.partial_map, staged + box * kBoxBytes,
                                           256 * output_half() + first_col + kBoxColumns * box, first_row, slot_of_head);
      ptx::cp_async_bulk_commit_group();
    }
    ptx::cp_async_bulk_wait_group_read();
    __syncwarp();
  };
  if constexpr (sizeof(typename Config::Partial) == 2) {
    const float factor0 = attention::half_partial_factor(attention::largest_of_row<0>(o) * inv_sum0);
    const float factor1 = attention::half_partial_factor(attention::largest_of_row<2>(o) * inv_sum1);
    if (lane % 4 == 0) {
      const int64_t slots = (int64_t)2 * params.num_sm_parts * params.h_kv;
      const int row = first_row + lane / 4;
      float* factors = attention::half_partial_factors(params.lse_partial, slots * rows) + (int64_t)slot_of_head * rows * 2 +
                       output_half();
      if (row < rows) factors[2 * row] = attention::inverse_power_of_two(factor0);
      if (row + 8 < rows) factors[2 * row + 16] = attention::inverse_power_of_two(factor1);
    }
    inv_sum0 *= factor0;
    inv_sum1 *= factor1;
#pragma unroll
    for (int box = 0; box < 4; box++) {
      uint32_t v[4][4];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float x = i % 2 == 0 ? inv_sum0 : inv_sum1;
        v[i / 4][i % 4] = tile::pack<fp16_t>(o[32 * box + 2 * i] * x, o[32 * box + 2 * i + 1] * x);
      }
      attention::store_probabilities(v, staged + box * kBoxBytes, lane);
    }
    copy(0);
  } else {
    const uint32_t mine = staged + tile::swizzle_128b(lane / 4, lane % 4 / 2) + lane % 2 * 8;  // 8 columns further: ^ 32
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll
      for (int i = 0; i < 16; i++) {  // 8 columns
        const int k = 64 * pass + 4 * i;
        const uint32_t at = (mine ^ i % 4 * 32) + i / 4 * kBoxBytes;
        ptx::st_shared_v2(at, make_uint2(__float_as_uint(o[k] * inv_sum0), __float_as_uint(o[k + 1] * inv_sum0)));
        ptx::st_shared_v2(at + 8 * tile::kTileRowBytes,
                          make_uint2(__float_as_uint(o[k + 2] * inv_sum1), __float_as_uint(o[k + 3] * inv_sum1)));
      }
      copy(128 * pass);
    }
  }
}

template <class Config>
__device__ __forceinline__ void compute_output(const DenseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> k_ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float o[128];
  const Loader<Config> loader{params, plan, smem};
  loader.begin();
  PageToken ahead;      // what is loaded next
  bool holds = false;   // the stage of the block before has not been given back: partial results go by way of it
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int block, end_block;
    {
      const Fragment fragment = load_fragment(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
    }
    const bool empty = block == end_block;
    for (bool first = true; block < end_block; block++, first = false) {
      if (holds) {
        arrive_once_per_warp(smem_addr(&smem.half_empty[output_half()][k_ring.stage]));
        if (ptx::elect_sync()) loader.load(k_ring.stage, k_ring.phase, ahead);
        __syncwarp();
        k_ring.advance();
      }
      const uint32_t v_tiles = smem_addr(smem.k_half[output_half()][k_ring.stage]);
#pragma unroll
      for (int t = 0; t < 4; t++) tile::wait(smem_addr(&smem.half_full[output_half()][k_ring.stage][t]), k_ring.phase);
      tile::wait(smem_addr(&smem.p_full), parity);
      parity ^= 1;
      if (block + 1 == end_block) zero_tail(params, plan, req, block, v_tiles);
      if (!first && smem.rescales[tile::warp_in_group()]) {
        const int row = tile::fragment_row_again();
        attention::rescale_output(smem.rescale[row], smem.rescale[row + 8], o);
      }
      // The last block's row factors are kept until inv_sum has been read.
      if (block + 1 < end_block) arrive_once_per_warp(smem_addr(&smem.p_empty));
      attention::start_product<typename Config::Element>(o, smem_addr(smem.rope_or_p[k_ring.stage]), v_tiles, first);
      ahead = {0, -1};  // found while the products run
      if (ptx::elect_sync()) ahead = loader.locate_next();
      __syncwarp();
      ptx::wgmma_wait_group<0>();
      holds = true;
    }
    float inv_sum0 = 0.0f, inv_sum1 = 0.0f;
    if (!empty) {
      inv_sum0 = smem.inv_sum[tile::fragment_row_again()];
      inv_sum1 = smem.inv_sum[tile::fragment_row_again() + 8];
      arrive_once_per_warp(smem_addr(&smem.p_empty));
    }
    const int slot = load_fragment(params, plan, req).slot;
    if (slot < 0)
      store_output<Config>(params, req, o, inv_sum0, inv_sum1);
    else if (!empty)  // else its log-sum-exp says that it does not count
      store_partial<Config>(params, smem, k_ring.stage, slot, o, inv_sum0, inv_sum1);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
// Before the kernels before this one are done: brings to the L2 what the CTA will read first. The plan, which says where that is,
// may still be written, so that this is a guess: its addresses stay within bounds, nothing else depends on it, and no L1 keeps
// what it has read.
template <class Config>
__device__ __forceinline__ void prefetch_first(const DenseDecodeParams& params, int req, int block) {
  using Element = typename Config::Element;
  req = min(max(req, 0), params.batch - 1);
  if (threadIdx.x == 0) ptx::prefetch_l2(params.cache_seqlens + req);
  if (threadIdx.x == 32 && params.block_table != nullptr) {
    block = min(max(block, 0), (params.max_seqlen - 1) / Config::kBlock);
    ptx::prefetch_l2(table_entry(params, req, block * Config::kBlock));
  }
  const int first_row = blockIdx.x * Config::kRows, rows = min(params.s_q * params.heads_per_kv - first_row, Config::kRows);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * Config::kTiles; i += Config::kThreads)
    ptx::prefetch_l2(query_row<Element>(params, req, first_row + i / Config::kTiles) + i % Config::kTiles * 64);
}

// Whether the CTAs together read so little of K that it had better be the first to leave the L2 again, in place of what is needed
// again; much of it comes more slowly then (docs/perf-log.md). By the CTA's own part, for the parts of a plan are about equal.
template <class Config>
__device__ __forceinline__ bool reads_little(const DenseDecodeParams& params, const PartPlan& plan) {
  return params.metadata != nullptr && plan.begin_req == plan.end_req &&
         (int64_t)(plan.end_block - plan.begin_block) * params.num_sm_parts * params.h_kv <= Config::kFewBlocks;
}

template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int half = 0; half < 2; half++) {
    for (int stage = 0; stage < Config::kStages; stage++) {
      for (int t = 0; t < 4; t++) ptx::mbarrier_init(smem_addr(&smem.half_full[half][stage][t]), 1);
      ptx::mbarrier_init(smem_addr(&smem.half_empty[half][stage]), 4);
    }
  }
  for (int stage = 0; stage < Config::kStages; stage++) ptx::mbarrier_init(smem_addr(&smem.rope_full[stage]), 1);
  ptx::mbarrier_init(smem_addr(&smem.p_full), 4);
  ptx::mbarrier_init(smem_addr(&smem.p_empty), 8);
  ptx::fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void kernel(const DenseDecodeParams& params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  Storage& smem = *reinterpret_cast<Storage*>(dynamic_smem);
  FLASHMLA_ASSERT(smem_addr(dynamic_smem) % 1024 == 0);
  int likely_req, likely_block = 0;
  if (params.metadata == nullptr) {
    likely_req = attention::whole_part_plan(blockIdx.z, params.num_sm_parts, params.batch).begin_req;
  } else {
    likely_req = ptx::ld_relaxed(params.metadata + 8 * blockIdx.z);
    likely_block = ptx::ld_relaxed(params.metadata + 8 * blockIdx.z + 1);
  }
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&params.k_map);
    if (params.o_partial != nullptr) ptx::prefetch_tensormap(&params.partial_map);
    init_barriers<Config>(smem);
  }
  prefetch_first<Config>(params, likely_req, likely_block);
  if (params.metadata == nullptr && threadIdx.x == 0)
    smem.plan = attention::whole_part_plan(blockIdx.z, params.num_sm_parts, params.batch);
  ptx::griddepcontrol_wait();
  // After the wait: whatever this grid was told (metadata), its dependents may read before theirs.
  ptx::griddepcontrol_launch_dependents();

  if (threadIdx.x == 0) {
    if (params.metadata != nullptr)
      smem.plan = attention::load_part_plan(params.metadata, blockIdx.z, params.num_sm_parts, params.batch);
    const int last_row = min((int)(blockIdx.x + 1) * Config::kRows, params.s_q * params.heads_per_kv) - 1;
    smem.plan.last_token = row_token(params, last_row);
    smem.reads_little = reads_little<Config>(params, smem.plan);
  }
  __syncthreads();
  const PartPlan& plan = smem.plan;  // read where needed: registers are scarce in every role
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_inc<Config::kScoreRegisters>();
    compute_scores<Config>(params, plan, smem);
  } else {
    ptx::setmaxnreg_dec<Config::kOutputRegisters>();
    compute_output<Config>(params, plan, smem);
  }
}

}  // namespace flashmla::dense_decode
