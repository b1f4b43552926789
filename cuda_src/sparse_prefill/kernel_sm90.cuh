// Sparse MLA prefill on Hopper: every query token attends to the rows of a bf16 KV array that its index list names;
// out = softmax(scale Q K^T) V, where V is the first 512 dims of K.
//
// Method: the pipeline of dense_decode. One warpgroup only computes scores, with most of Q held as register operands, which
// leaves shared memory for three KV stages; two only accumulate, each one half of the 512 output dims. Rows are gathered by
// cp.async, 16 bytes a lane, by the warps that leave a stage last.
//
// grid    persistent CTAs, one an SM, as many as the rounds need; an item is 64 heads of one query token. CTA i works on items i,
//         i + grid, ...: the head blocks of a token at the same time on neighbours
// block   384 threads, no cluster; 184 registers a thread for scores, 160 for output
// roles   warpgroup 0  scores: S = Q K^T, softmax, P to shared memory, row maxima and sums, log-sum-exp, sink
//         warpgroup 1  output half 0: O[:, 0:256] += P V      warpgroup 2  output half 1: O[:, 256:512] += P V
//         An output warp also gathers: dims of its half of 16 tokens of a block, into the stage that its warpgroup has just
//         left; half 1 also the RoPE dims, once both have left the stage; half 0 also validity bits. Its indices are loaded
//         a block ahead. Loads run on into the next items, with a prefetch of their Q to the L2; Q of the next item comes under
//         the softmax of an item's last block.
// order   The halves are told of P (n) only when Q K^T (n + 1) is nearly done, and keep the tensor cores busy while the score
//         warpgroup is at its softmax of n + 1.
// P (n) takes the place of the RoPE tile of its stage, which Q K^T (n) was the last to read.
//
// barrier           arrivals                      armed by     waited on by
// full[s]           256 (cp.async of threads)     both halves  scores       a block and its validity bits are in stage s
//                   + 4 (warps of half 0)
// q_full            128 (cp.async of threads)     scores       scores       what of Q is not in registers is there
// half_empty[h][s]  4 (warps)                     half h       both halves  P V of the block in stage s is done
// p_full            4 (warps)                     scores       both halves  p, rescale, inv_sum may be read. K may be too: the
//                                                                           score warps, which read it before, made it visible
// p_empty           8 (warps)                     both halves  scores       rescale, inv_sum have been read
#pragma once
#include "attention/epilogue.cuh"
#include "attention/online_softmax.cuh"
#include "attention/output_tile.cuh"
#include "attention/query_tile.cuh"
#include "attention/token_validity.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_mbarrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "ptx/wgmma.cuh"
#include "sparse_prefill/config.cuh"
#include "sparse_prefill/keys.cuh"
#include "sparse_prefill/params.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_prefill {

using tile::arrive_once_per_warp;
using tile::smem_addr;

constexpr uint32_t kScoreBarrier = 1;
constexpr unsigned kFullWarp = 0xffffffffu;

// Which half of the output an output warp works on. Derived again at each use, like all that depends on the thread: the
// accumulators leave few registers.
__device__ __forceinline__ int output_half() { return ptx::tid_x() / 128 - 1; }

// ---- gather -----------------------------------------------------------------------------------------------------
// An output warp's share of each block: the dims of its half of tokens 16 w to 16 w + 15.
template <class Config>
struct Gatherer {
  const SparsePrefillParams& params;
  typename Config::Storage& smem;
  int32_t index;  // of token lane % 16 of the share; requested a block before it is needed

  static __device__ __forceinline__ int warp() { return ptx::tid_x() / 32 % 4; }
  __device__ __forceinline__ Cursor& cursor() const { return smem.cursor[output_half()][warp()]; }

  __device__ __forceinline__ void begin() {
    enter_item(params, cursor(), blockIdx.x);
    index = load_index(params, cursor());
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; stage++) gather(stage, 1);
  }

  // The next block into `stage`, once every warp has left it (parity of half_empty).
  __device__ __forceinline__ void gather(int stage, uint32_t empty_parity) {
    const int item = cursor().item, half = output_half();
    if (item >= params.items) return;
    const bool exists = (uint32_t)index < (uint32_t)max(cursor().kv_rows, 0);
    const uint32_t valid = __ballot_sync(kFullWarp, exists);
    tile::wait(smem_addr(&smem.half_empty[half][stage]), empty_parity);
    if (half == 0) {
      if (tile::lane_id() == 0) smem.valid[stage].bits[warp()] = (uint16_t)valid;
      arrive_once_per_warp(smem_addr(&smem.full[stage]));
    } else if (Config::kRope) {
      tile::wait(smem_addr(&smem.half_empty[0][stage]), empty_parity);
    }
    copy(stage, exists ? index : -1);
    ptx::cp_async_mbarrier_arrive_noinc(smem_addr(&smem.full[stage]));
    next_block(params, cursor());
    index = load_index(params, cursor());
    if (cursor().item != item) prefetch_query<Config>(params, cursor().item, half);
  }

  // named: the row of this lane's token, or -1, which becomes zeros and is not read. Eight lanes copy 128 bytes of a token,
  // which the swizzle puts into eight different groups of banks; they take four tokens in turn.
  __device__ __forceinline__ void copy(int stage, int named) const {
    const int half = output_half(), lane = ptx::tid_x() % 32, first = lane / 8 * 4, chunk = lane % 8;
    int rows[4];
#pragma unroll
    for (int i = 0; i < 4; i++) rows[i] = __shfl_sync(kFullWarp, named, first + i);
    const uint32_t to = tile::swizzle_128b(16 * warp() + first, chunk);
    const uint32_t tiles = smem_addr(smem.k_half[half][stage]) + to, rope = smem_addr(smem.rope_or_p[stage]) + to;
    const uint8_t* kv = cursor().kv + 512 * half + 16 * chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* src = reinterpret_cast<const uint8_t*>(
          ptx::mad_wide_s32(max(rows[i], 0), params.kv_row_bytes, reinterpret_cast<int64_t>(kv)));
      const uint32_t dst = (tiles ^ i << 4) + tile::kTileRowBytes * i;  // the swizzle of a row i further
#pragma unroll
      for (int t = 0; t < 4; t++) ptx::cp_async_16_of_index(rows[i], dst + t * tile::kTileBytes, src + 128 * t);
      if (Config::kRope && half == 1)
        ptx::cp_async_16_of_index(rows[i], (rope ^ i << 4) + tile::kTileRowBytes * i, src + 512);
    }
  }
};

// ---- scores -----------------------------------------------------------------------------------------------------
// Q of an item in two steps. First what becomes register operands: as soon as Q K^T of the item before is done with them, so
// that it arrives under the softmax.
template <class Config>
__device__ __forceinline__ void request_query(const SparsePrefillParams& params, int item,
                                              uint32_t (&q)[Config::kQRegSteps][4]) {
  const Item at = item_at(params, item);
  attention::request_query([&](int row) { return query_row(params, at, row); }, q);
}
// Then the rest, to shared memory, when no warp reads that any more. The copies complete on an mbarrier, for a wait for this
// thread's copies is moved up by ptxas, between the loads. The fence that makes them visible to wgmma is that of the first block.
template <class Config>
__device__ __forceinline__ void copy_query_rest(const SparsePrefillParams& params, int item, typename Config::Storage& smem) {
  const Item at = item_at(params, item);
  attention::copy_query_rest<Config::kRope>([&](int row) { return query_row(params, at, row); }, params.h_q - at.first_head,
                                            smem_addr(smem.q_rope), smem_addr(smem.q_piece));
  ptx::cp_async_mbarrier_arrive_noinc(smem_addr(&smem.q_full));
}

// S = Q K^T for one block. Two commit groups: all tiles but the last, and the last.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[32], const uint32_t (&q)[Config::kQRegSteps][4],
                                             typename Config::Storage& smem,
                                             const tile::RingPosition<Config::kStages>& ring) {
  tile::wait(smem_addr(&smem.full[ring.stage]), ring.phase);
  ptx::fence_proxy_async();  // what cp.async wrote, and P of the block before, is for wgmma to read, here and in the output warps
  ptx::wgmma_fence();
#pragma unroll
  for (int t = 0; t < Config::kTiles; t++) {
    if (t == Config::kTiles - 1) ptx::wgmma_commit_group();
    const bool rope = t == 8;
    const auto* k = rope ? smem.rope_or_p[ring.stage] : smem.k_half[t / 4 % 2][ring.stage][t % 4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint64_t b = tile::advance(tile::k_major_desc(smem_addr(k)), i * tile::kKMajorStepBytes);
      const int step = 4 * t + i;
      if (step < Config::kQRegSteps) {
        ptx::wgmma_m64n64k16_rs<bf16_t>(s, q[step < Config::kQRegSteps ? step : 0], b, step > 0);
      } else if (rope) {
        const uint64_t a = tile::advance(tile::k_major_desc(smem_addr(smem.q_rope)), i * tile::kKMajorStepBytes);
        ptx::wgmma_m64n64k16_ss<bf16_t>(s, a, b, 1);
      } else {
        ptx::wgmma_m64n64k16_ss<bf16_t>(s, tile::k_major_desc_32b(smem_addr(smem.q_piece)), b, 1);
      }
    }
  }
  ptx::wgmma_commit_group();
}

// What the output of a head is multiplied with: 1 / (row sum and the sink).
__device__ __forceinline__ float output_factor(const SparsePrefillParams& params, const attention::RowState& state,
                                               int head) {
  if (state.sum == 0.0f) return 0.0f;
  if (params.attn_sink == nullptr || head >= params.h_q) return 1.0f / state.sum;
  return 1.0f / (state.sum + ptx::ex2_approx_ftz(__ldg(params.attn_sink + head) * kLog2E - state.max_log2));
}

__device__ __forceinline__ void store_statistics(const SparsePrefillParams& params, int token, int head,
                                                 const attention::RowState& state, float max_score) {
  if (head >= params.h_q || (threadIdx.x & 3) != 0) return;
  params.max_logits[token * params.max_logits_stride_token + head * params.max_logits_stride_head] =
      max_score * params.scale_log2 * kLn2;
  params.lse[token * params.lse_stride_token + head * params.lse_stride_head] =
      (state.max_log2 + ptx::lg2_approx_ftz(state.sum)) * kLn2;
}

// Registers are scarce here (Q takes 124 of 184): what the loop over blocks does not need every time is derived again.
template <class Config>
__device__ __forceinline__ void compute_scores(const SparsePrefillParams& params, typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  // Bit 0: parity of the count of blocks (p_full and p_empty complete once a block), bit 1: of the loads of Q.
  uint32_t parities = 0;
  uint32_t q[Config::kQRegSteps][4];
  float s[32];
  int next = next_item(params, blockIdx.x);  // whose Q is loaded next: the next that attends to anything
  if (next < params.items) {
    request_query<Config>(params, next, q);
    copy_query_rest<Config>(params, next, smem);
  }
#pragma unroll 1
  for (int item = blockIdx.x; item < params.items; item += gridDim.x) {
    int blocks_left = blocks_of(params, item_at(params, item).token);
    if (blocks_left > 0) {
      attention::arrange_query(params.h_q - item_at(params, item).first_head, q);
      tile::wait(smem_addr(&smem.q_full), parities >> 1 & 1);
      parities ^= 2;
      next = next_item(params, item + gridDim.x);
    }
    // Rows past the last head get an infinite maximum: their probabilities are zero, like their queries.
    const int head = item_at(params, item).first_head + tile::fragment_row_again();
    attention::RowState state0{head < params.h_q ? attention::kNothing : infinity(), 0.0f};
    attention::RowState state1{head + 8 < params.h_q ? attention::kNothing : infinity(), 0.0f};
    float max_score0 = -infinity(), max_score1 = -infinity();  // exact, unlike what probabilities are relative to
    bool pending = false;  // P of the block before is not announced yet
    for (; blocks_left > 0; blocks_left--) {
      const bool last = blocks_left == 1;
      issue_scores<Config>(s, q, smem, ring);
      ptx::wgmma_wait_group<1>();
      if (pending) arrive_once_per_warp(smem_addr(&smem.p_full));
      const attention::TokenValidity valid = smem.valid[ring.stage];  // on its way while the last tile is multiplied
      ptx::wgmma_wait_group<0>();
      if (last && next < params.items) request_query<Config>(params, next, q);
      attention::mask_invalid(s, valid);
      float max0, max1, rescale0, rescale1;
      attention::row_max(s, max0, max1);
      max_score0 = fmaxf(max_score0, max0);
      max_score1 = fmaxf(max_score1, max1);
      attention::update_maxima(state0, state1, max0 * params.scale_log2, max1 * params.scale_log2, rescale0, rescale1);
      attention::exponentiate(s, params.scale_log2, state0, state1);

      parities ^= 1;
      tile::wait(smem_addr(&smem.p_empty), parities & 1);
      ptx::bar_sync(kScoreBarrier, 128);  // no warp's Q K^T reads the RoPE tile, or Q, any more
      uint32_t p[4][4];
      attention::pack_probabilities<bf16_t>(s, p);
      attention::store_probabilities(p, smem_addr(smem.rope_or_p[ring.stage]), threadIdx.x % 128);
      ring.advance();
      if (last) {
        state0.sum = tile::quad_sum(state0.sum);
        state1.sum = tile::quad_sum(state1.sum);
      }
      if ((threadIdx.x & 3) == 0) {
        const int row = tile::fragment_row();
        smem.rescale[row] = rescale0;
        smem.rescale[row + 8] = rescale1;
        if (last) {
          const int head = item_at(params, item).first_head + row;
          smem.inv_sum[row] = output_factor(params, state0, head);
          smem.inv_sum[row + 8] = output_factor(params, state1, head + 8);
        }
      }
      pending = !last;
      if (last) {
        ptx::fence_proxy_async();
        arrive_once_per_warp(smem_addr(&smem.p_full));
        if (next < params.items) copy_query_rest<Config>(params, next, smem);
      }
    }
    const Item at = item_at(params, item);
    const int head_again = at.first_head + tile::fragment_row_again();
    store_statistics(params, at.token, head_again, state0, max_score0);
    store_statistics(params, at.token, head_again + 8, state1, max_score1);
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
template <int kOffset>
__device__ __forceinline__ void store_output_row(const SparsePrefillParams& params, const Item& item, int half, int row,
                                                 const float (&o)[128], float inv_sum) {
  const int head = item.first_head + row;
  bf16_t* dst = reinterpret_cast<bf16_t*>(params.out) + item.token * params.out_stride_token +
                head * params.out_stride_head + 256 * half;
  attention::store_row_16bit<bf16_t, kOffset>(o, inv_sum, head < params.h_q ? dst : nullptr);
}

template <class Config>
__device__ __forceinline__ void compute_output(const SparsePrefillParams& params, typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float o[128];
  Gatherer<Config> gatherer{params, smem, -1};
  gatherer.begin();
#pragma unroll 1
  for (int item = blockIdx.x; item < params.items; item += gridDim.x) {
    int blocks_left = blocks_of(params, item_at(params, item).token);
    const bool empty = blocks_left == 0;
    for (bool first = true; blocks_left > 0; blocks_left--, first = false) {
      tile::wait(smem_addr(&smem.p_full), parity);
      parity ^= 1;
      if (!first) {
        const int row = tile::fragment_row_again();
        attention::rescale_output(smem.rescale[row], smem.rescale[row + 8], o);
      }
      // The last block's row factors are kept until inv_sum has been read.
      if (blocks_left > 1) arrive_once_per_warp(smem_addr(&smem.p_empty));
      attention::start_product<bf16_t>(o, smem_addr(smem.rope_or_p[ring.stage]), 
                                       smem_addr(smem.k_half[output_half()][ring.stage]), first);
      ptx::wgmma_wait_group<0>();
      arrive_once_per_warp(smem_addr(&smem.half_empty[output_half()][ring.stage]));
      gatherer.gather(ring.stage, ring.phase);
      ring.advance();
    }
    float inv_sum0 = 0.0f, inv_sum1 = 0.0f;
    if (!empty) {
      inv_sum0 = smem.inv_sum[tile::fragment_row_again()];
      inv_sum1 = smem.inv_sum[tile::fragment_row_again() + 8];
      arrive_once_per_warp(smem_addr(&smem.p_empty));
    }
    const Item at = item_at(params, item);
    const int row = tile::fragment_row_again();
    store_output_row<0>(params, at, output_half(), row, o, inv_sum0);
    store_output_row<2>(params, at, output_half(), row + 8, o, inv_sum1);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    ptx::mbarrier_init(smem_addr(&smem.full[stage]), 256 + 4);
    for (int half = 0; half < 2; half++) ptx::mbarrier_init(smem_addr(&smem.half_empty[half][stage]), 4);
  }
  ptx::mbarrier_init(smem_addr(&smem.q_full), 128);
  ptx::mbarrier_init(smem_addr(&smem.p_full), 4);
  ptx::mbarrier_init(smem_addr(&smem.p_empty), 8);
  ptx::fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void kernel(const SparsePrefillParams& params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  Storage& smem = *reinterpret_cast<Storage*>(dynamic_smem);
  FLASHMLA_ASSERT(smem_addr(dynamic_smem) % 1024 == 0);
  if (threadIdx.x == 0) init_barriers<Config>(smem);
  ptx::griddepcontrol_wait();
  // After the wait: what earlier grids wrote, the dependents of this one may read before theirs.
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_inc<Config::kScoreRegisters>();
    compute_scores<Config>(params, smem);
  } else {
    ptx::setmaxnreg_dec<Config::kOutputRegisters>();
    compute_output<Config>(params, smem);
  }
}

}  // namespace flashmla::sparse_prefill
