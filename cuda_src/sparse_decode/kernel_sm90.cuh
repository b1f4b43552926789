// MLA decode over an FP8 cache on Hopper. Sparse: every query token attends to the cache slots that its index list names.
// Paged (dense): to the tokens of its request, by a block table. In blocks of 64; out = softmax(scale Q K^T) V, where V is
// the first 512 dims of the dequantized K.
//
// Method: FlashMLA's FP8 sparse decode on the pipeline of dense_decode: scores and output by warpgroups of their own, most
// of Q as register operands. Tokens are staged in shared memory as they lie in the cache, a block ahead, and made the bf16
// tiles which the copy engine brings there; by a fourth warpgroup, and by the output warpgroups while they wait for P.
// Crossover: two CTAs of a cluster, with different heads of one query token (paged: with any rows), each dequantize half of
// a block and send it to the other; without it, each CTA dequantizes every token it needs.
//
// grid    sparse: (ceil(h_q / 64), s_q, num_sm_parts); paged: (ceil(s_q h_q / 64), 1, num_sm_parts)
// block   512 threads, one CTA an SM; cluster of 2 along x with the crossover, else none
// roles   warpgroup 0  scores: S = Q K^T, masking, softmax, P to shared memory, row sums, log-sum-exp, sink
//         warpgroup 1  output half 0: O[:, 0:256] += P V; dequantizes dims 0-255 of tokens 32-63 of a block
//         warpgroup 2  output half 1: O[:, 256:512] += P V; dequantizes the other dims of those tokens
//         warpgroup 3  finds the tokens of each block, tells the output warps where theirs lie, dequantizes tokens 0-31,
//                      writes validity bits. Crossover: halves of the CTA's 32 tokens instead
//         A warp copies what it converts itself: 8 tokens (crossover: 4, and stores them in the other CTA too).
// order   P V (n) of half 0 runs beside Q K^T (n + 1), that of half 1 begins when the first half of the dims of Q K^T (n + 1) is
//         done. Half 0 of a stage is thus free, and dequantized again, before half 1, and Q K^T reads it first.
//
// spills  With the crossover over the 656-byte layout one register of the output warps, stored and loaded once a block:
//         scores need the registers for Q, which has no room in shared memory. Measured for comparison, never selected.
//
// barrier        arrivals    armed by      waited on by
// k_full[s][h]   8 (warps)   3, half h     scores, half h  half h of the dims of a block is in stage s; with h = 1 also the
//                validity bits; + the other CTA's tokens (32 x dims x 2 bytes) with the crossover
// k_empty[s][h]  4 (warps)   half h        3, half h       P V of half h of the block in stage s is done; 8 with the crossover:
//                the other CTA's half h too, for its stage is written from here
// names_full     4 (warps)   3             both halves     where the tokens of a block lie, and whether there is one
// names_empty    8 (warps)   both halves   3               they have been read
// p_full[h]      4 (warps)   scores        half h          p, rescale, inv_sum may be read
// p_empty        8 (warps)   both halves   scores          p, rescale, inv_sum have been read
#pragma once
#include "attention/epilogue.cuh"
#include "attention/half_partial.cuh"
#include "attention/online_softmax.cuh"
#include "attention/output_tile.cuh"
#include "attention/split.cuh"
#include "attention/token_validity.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/bar.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "ptx/st_async.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_n128.cuh"
#include "sparse_decode/config.cuh"
#include "sparse_decode/dequantize.cuh"
#include "sparse_decode/keys.cuh"
#include "sparse_decode/rows.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

using tile::arrive_once_per_warp;
using tile::smem_addr;

constexpr uint32_t kScoreBarrier = 1;

// ---- dequantize -------------------------------------------------------------------------------------------------
// A warp's share of every block: kTokens tokens, those of region 0 by warpgroup 3, of region 1 by the output warpgroups.
// Registers are scarce: what depends on the thread is derived again at each use.
template <class Config, int region>
struct Share {
  using Format = typename Config::Format;
  static constexpr int kTokens = Config::kTokensOfAWarp;
  typename Config::Storage& smem;

  static __device__ __forceinline__ int warp() { return ptx::tid_x() / 32 % 4; }
  static __device__ __forceinline__ uint32_t rank() { return Config::kCrossover ? ptx::cluster_ctarank() : 0; }
  // The first token of the share of `region_`, in its block.
  static __device__ __forceinline__ int first_token(int region_ = region) {
    return kTokens * (8 * rank() + 4 * region_ + warp());
  }
  __device__ __forceinline__ uint32_t slots(int half) const {
    using Stage = Staging<Format>;
    const int first = kTokens * (4 * region + warp());
    const int offset = half == 0 ? Stage::kBytes0 * first : Stage::kBytes0 * 8 * kTokens + Stage::kBytes1 * first;
    return smem_addr(smem.staged) + offset;
  }
  // Starts the copies: at(i) tells where token i of the share lies.
  template <class At>
  __device__ __forceinline__ void copy(int half, At at) const {
#pragma unroll
    for (int first = 0; first < kTokens; first += 4) {
      const int i = first + ptx::tid_x() % 32 / 8;
      copy_token<Format>(at(i), slots(half) + (half == 0 ? Staging<Format>::kBytes0 : Staging<Format>::kBytes1) * i, half);
    }
    ptx::cp_async_commit_group();
  }
  // Converts what has been copied into a stage that is free, and says so. `counts`: this warp tells of the other CTA's bytes.
  __device__ __forceinline__ void convert(int half, const tile::RingPosition<Config::kStages>& ring, bool counts) const {
    const uint32_t full = smem_addr(&smem.k_full[ring.stage][half]);
    uint32_t to_other = 0;
    if constexpr (Config::kCrossover) to_other = ptx::mapa(full, rank() ^ 1) - full;
    convert_tokens<Format, kTokens>(slots(half), smem_addr(smem.k[ring.stage]), first_token(), half,
                                    [&](uint32_t addr, uint4 v) {
                                      ptx::st_shared_v4(addr, v);
                                      if constexpr (Config::kCrossover) ptx::st_async_v4(addr + to_other, v, full + to_other);
                                    });
    ptx::fence_proxy_async();
    if (Config::kCrossover && counts) {
      __syncwarp();
      const int dims = half == 0 ? 256 : Format::kQk - 256;
      if (tile::lane_id() == 0) ptx::mbarrier_arrive_expect_tx(full, Config::kBlock / 2 * dims * 2);
    } else {
      arrive_once_per_warp(full);
    }
  }
};

// Warpgroup 3. What is converted was copied a block before, and named two blocks before.
template <class Config>
__device__ __forceinline__ void dequantize(const SparseDecodeParams& params, const PartPlan& plan,
                                           typename Config::Storage& smem) {
  using Format = typename Config::Format;
  const Share<Config, 0> share{smem};
  constexpr int kTokens = share.kTokens;
  const int lane = tile::lane_id(), warp = tile::warp_in_group();
  // Lanes 0-15: the tokens of this warp's share and, behind them, those of the same warp of the output warpgroups. Lanes
  // 16-31: those whose validity bits it writes, for both CTAs need the bits of all 64.
  const int region = lane / kTokens % 2;
  TokenCursor<Config> cursor(params, plan,
                             lane < 16 ? share.first_token(region) + lane % kTokens : 16 * warp + lane % 16);
  int named = 0;  // blocks named but not converted yet
  const auto next_name = [&] {
    const TokenName name = cursor.load_name();
    if (!cursor.at_end()) {
      named++;
      cursor.next();
    }
    return name;
  };
  tile::RingPosition<1> names;
  const auto publish = [&](const TokenAddress& at, bool exists) {
    tile::wait(smem_addr(&smem.names_empty), names.phase ^ 1);
    if (region == 1 && lane < 2 * kTokens) {
      smem.row[kTokens * warp + lane % kTokens] = at.row;
      if (!Format::kScalesInRow) smem.to_scales[kTokens * warp + lane % kTokens] = at.to_scales;
    }
    if (warp == 0 && lane == 0) smem.exists = exists;
    arrive_once_per_warp(smem_addr(&smem.names_full));
    names.advance();
  };
  TokenName name = next_name();
  TokenAddress at = locate<Config>(params, name);
  name = next_name();
  publish(at, named > 0);
  const auto own = [&](int i) { return shuffle<Format>(at, i); };
#pragma unroll 1
  for (int half = 0; half < 2; half++) share.copy(half, own);

  tile::RingPosition<Config::kStages> ring;
  for (; named > 0; named--) {
    const uint32_t valid = __ballot_sync(kFullWarp, at.row != nullptr) >> 16;
    at = locate<Config>(params, name);
    name = next_name();
    publish(at, named > 1);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      ptx::cp_async_wait_group<1>();
      __syncwarp();
      tile::wait(smem_addr(&smem.k_empty[ring.stage][half]), ring.phase ^ 1);
      if (half == 1 && lane == 0) smem.valid[ring.stage].bits[warp] = valid;
      share.convert(half, ring, warp == 0);
      share.copy(half, own);
    }
    ring.advance();
  }
  ptx::cp_async_wait_all();
}

// An output warp's shares of the blocks, in order.
template <class Config>
struct Dequantizer {
  using Format = typename Config::Format;
  const Share<Config, 1> share;
  const int half;
  bool more;  // a share has been copied that is not converted yet

  // Starts the copy of the share of the next block, if there is one. parity: of its number.
  __device__ __forceinline__ void copy(uint32_t parity) {
    auto& smem = share.smem;
    tile::wait(smem_addr(&smem.names_full), parity);
    more = smem.exists;
    if (more)
      share.copy(half, [&](int i) {
        const int token = share.kTokens * share.warp() + i;
        return TokenAddress{smem.row[token], Format::kScalesInRow ? 0 : smem.to_scales[token]};
      });
    arrive_once_per_warp(smem_addr(&smem.names_empty));
  }
  // Converts what has been copied, for the block at `ring`, and copies the next.
  __device__ __forceinline__ void next(const tile::RingPosition<Config::kStages>& ring, uint32_t next_parity) {
    if (!more) return;
    ptx::cp_async_wait_all();
    __syncwarp();
    tile::wait(smem_addr(&share.smem.k_empty[ring.stage][half]), ring.phase ^ 1);
    share.convert(half, ring, false);
    copy(next_parity);
  }
};

// Waits for half a block; what the other CTA sent must also be made visible to wgmma.
template <class Config>
__device__ __forceinline__ void wait_for_half(typename Config::Storage& smem,
                                              const tile::RingPosition<Config::kStages>& ring, int half) {
  tile::wait(smem_addr(&smem.k_full[ring.stage][half]), ring.phase);
  if constexpr (Config::kCrossover) ptx::fence_proxy_async();
}

// ---- scores -----------------------------------------------------------------------------------------------------
// Q of one request: the first kQRegTiles tiles as wgmma A fragments, the rest to shared memory, dims ordered as those of K
// (see dequantize.cuh): 16 bytes of a row are a lane's columns of two steps. Rows past the last are zero. All loads are on
// their way at once: the rest is copied as it lies and then put in order by its quad, in place.
template <class Config>
__device__ __forceinline__ void load_query(const SparseDecodeParams& params, int req, typename Config::Storage& smem,
                                           uint32_t (&q)[4 * Config::kQRegTiles][4]) {
  constexpr int kRegGroups = 2 * Config::kQRegTiles, kSmemGroups = 2 * Config::kTiles - kRegGroups;  // of 32 dims
  constexpr int kAtOnce = kSmemGroups / 2;
  const auto source = [&](int row) { return query_pointer<Config>(params, req, row) + 8 * (ptx::tid_x() & 3); };
  const auto piece = [&](int row, int i) { return smem_addr(smem.q[i / 2]) + tile::swizzle_128b(row, i % 2 * 4); };
  ptx::bar_sync(kScoreBarrier, 128);  // every warp is done with the previous request's tiles
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const bf16_t* src = source(tile::fragment_row_again() + 8 * r);
#pragma unroll
    for (int i = 0; i < kRegGroups; i++) {
      const uint4 v = *reinterpret_cast<const uint4*>(src + 32 * i);
      q[2 * i][r] = v.x;
      q[2 * i][2 + r] = v.y;
      q[2 * i + 1][r] = v.z;
      q[2 * i + 1][2 + r] = v.w;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = tile::fragment_row_again() + 8 * r, c = ptx::tid_x() & 3;
    const bf16_t* src = source(row) + 32 * kRegGroups;
    const uint32_t bytes = query_row<Config>(params, row).exists ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kSmemGroups; i++) ptx::cp_async_16(piece(row, i) ^ (c << 4), src + 32 * i, bytes);
  }
  ptx::bar_sync(kScoreBarrier, 128);  // holds the compiler to it: no load moves behind a barrier
  ptx::cp_async_wait_all();
#pragma unroll
  for (int first = 0; first < 2 * kSmemGroups; first += kAtOnce) {  // half a row at a time
    const int row = tile::fragment_row_again() + first / kSmemGroups * 8, c = ptx::tid_x() & 3;
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) v[i] = ptx::ld_shared_v4(piece(row, (first + i) % kSmemGroups) ^ (c << 4));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const uint32_t dst = piece(row, (first + i) % kSmemGroups) + 4 * c;
      ptx::st_shared(dst, v[i].x);
      ptx::st_shared(dst ^ 16, v[i].y);
      ptx::st_shared(dst ^ 32, v[i].z);
      ptx::st_shared(dst ^ 48, v[i].w);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint32_t keep = query_row<Config>(params, tile::fragment_row_again() + 8 * r).exists ? ~0u : 0u;
#pragma unroll
    for (int i = 0; i < 2 * kRegGroups; i++) {
      q[i][r] &= keep;
      q[i][2 + r] &= keep;
    }
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(kScoreBarrier, 128);
}

// S = Q K^T for one block. The half of the dims that comes first is done when between_halves() is called.
template <class Config, class BetweenHalves>
__device__ __forceinline__ void compute_products(float (&s)[32], const uint32_t (&q)[4 * Config::kQRegTiles][4],
                                                 typename Config::Storage& smem,
                                                 const tile::RingPosition<Config::kStages>& ring,
                                                 BetweenHalves between_halves) {
  const uint64_t q_desc = tile::k_major_desc(smem_addr(smem.q));
  const uint64_t k_desc = tile::k_major_desc(smem_addr(smem.k[ring.stage]));
#pragma unroll
  for (int step = 0; step < 4 * Config::kTiles; step++) {
    if (step == 16) {
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      between_halves();
    }
    if (step == 0 || step == 16) {
      wait_for_half<Config>(smem, ring, step / 16);
      ptx::wgmma_fence();
    }
    const int offset = step / 4 * tile::kTileBytes + step % 4 * tile::kKMajorStepBytes;
    const uint64_t b = tile::advance(k_desc, offset);
    if (step < 4 * Config::kQRegTiles)
      ptx::wgmma_m64n64k16_rs<bf16_t>(s, q[step < 4 * Config::kQRegTiles ? step : 0], b, step > 0);
    else
      ptx::wgmma_m64n64k16_ss<bf16_t>(s, tile::advance(q_desc, offset - Config::kQRegTiles * tile::kTileBytes), b, 1);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
}

// Registers are scarce here (without the crossover Q takes 80 of 144): what the loop over blocks does not need every time is
// derived again.
template <class Config>
__device__ __forceinline__ void compute_scores(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    // Rows past the last get an infinite maximum: their probabilities are zero, like their queries.
    const int row = tile::fragment_row_again();
    attention::RowState state0{query_row<Config>(params, row).exists ? attention::kNothing : infinity(), 0.0f};
    attention::RowState state1{query_row<Config>(params, row + 8).exists ? attention::kNothing : infinity(), 0.0f};
    int block, end_block;
    {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
    }
    uint32_t q[4 * Config::kQRegTiles][4];
    if (block < end_block) load_query<Config>(params, req, smem, q);
    bool pending = false;  // half 1 has not been told of P of the block before
    for (; block < end_block; block++) {
      float s[32];
      compute_products<Config>(s, q, smem, ring, [&] {
        if (pending) arrive_once_per_warp(smem_addr(&smem.p_full[1]));
      });
      attention::mask_invalid(s, smem.valid[ring.stage]);
      if constexpr (Config::kPaged)
        if (params.causal) mask_unseen<Config>(params, req, block, s);
      ring.advance();
      float max0, max1, rescale0, rescale1;
      attention::row_max(s, max0, max1);
      attention::update_maxima(state0, state1, max0 * params.scale_log2, max1 * params.scale_log2, rescale0, rescale1);
      attention::exponentiate(s, params.scale_log2, state0, state1);

      tile::wait(smem_addr(&smem.p_empty), parity ^ 1);
      parity ^= 1;
      uint32_t p[4][4];
      attention::pack_probabilities<bf16_t>(s, p);
      attention::store_probabilities(p, smem_addr(smem.p), ptx::tid_x() % 128);
      ptx::fence_proxy_async();
      const bool last = block + 1 == end_block;
      if (last) {
        state0.sum = tile::quad_sum(state0.sum);
        state1.sum = tile::quad_sum(state1.sum);
      }
      if ((threadIdx.x & 3) == 0) {
        const int row = tile::fragment_row_again();
        smem.rescale[row] = rescale0;
        smem.rescale[row + 8] = rescale1;
        if (last) {
          const int slot = attention::slot_of(plan, req);
          smem.inv_sum[row] = output_factor(params, state0, query_row<Config>(params, row), slot);
          smem.inv_sum[row + 8] = output_factor(params, state1, query_row<Config>(params, row + 8), slot);
        }
      }
      arrive_once_per_warp(smem_addr(&smem.p_full[0]));
      pending = !last;
      if (last) arrive_once_per_warp(smem_addr(&smem.p_full[1]));
    }
    const int slot = attention::slot_of(plan, req), row_again = tile::fragment_row_again();
    store_lse(params, slot, req, query_row<Config>(params, row_again), state0);
    store_lse(params, slot, req, query_row<Config>(params, row_again + 8), state1);
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
// A warp is done with its half of a stage, here and, with the crossover, for the other CTA, which writes to it.
template <class Config>
__device__ __forceinline__ void leave_half(typename Config::Storage& smem,
                                           const tile::RingPosition<Config::kStages>& ring, int half) {
  const uint32_t empty = smem_addr(&smem.k_empty[ring.stage][half]);
  arrive_once_per_warp(empty);
  if (Config::kCrossover && tile::lane_id() == 0)
    ptx::mbarrier_arrive_cluster(ptx::mapa(empty, ptx::cluster_ctarank() ^ 1));
}

// O += P V for one block, left running in a commit group.
__device__ __forceinline__ void start_product(float (&o)[128], uint32_t p_smem, uint32_t v_tiles) {
  ptx::wgmma_fence();
  const uint64_t p_desc = tile::k_major_desc(p_smem), v_desc = tile::mn_major_desc(v_tiles);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint64_t p = tile::advance(p_desc, k * tile::kKMajorStepBytes);
    const uint64_t v = tile::advance(v_desc, k * tile::kMnMajorStepBytes);
    ptx::wgmma_m64n128k16_ss_mn_bf16<0>(o, p, v);
    ptx::wgmma_m64n128k16_ss_mn_bf16<64>(o, p, tile::advance(v, 2 * tile::kTileBytes));
  }
  ptx::wgmma_commit_group();
}

// One row of a half, whose columns are ordered as V's dims: a lane holds 8 adjacent dims of every 32. row: null to skip it.
// kOffset 0 | 2: the thread's first or second row; value(k): of accumulator k.
template <class Element, int kOffset, class Value>
__device__ __forceinline__ void store_row(Element* row, Value value) {
  if (row == nullptr) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t v[4];
#pragma unroll
    for (int g = 0; g < 4; g++) {
      const int k = 16 * i + 4 * g + kOffset;
      v[g] = tile::pack<Element>(value(k), value(k + 1));
    }
    reinterpret_cast<uint4*>(row + 32 * i)[tile::lane_id() & 3] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

template <class Config, int kOffset>
__device__ __forceinline__ void store_output_row(const SparseDecodeParams& params, int half, int slot, int req,
                                                 int local_row, const float (&o)[128], float inv_sum) {
  const QueryRow row = query_row<Config>(params, local_row);
  if (slot >= 0) {
    const int64_t index = ((int64_t)slot * params.s_q + row.token) * params.h_q + row.head;
    // What a row that attended to nothing holds does not count.
    const float factor = attention::half_partial_factor(attention::largest_of_row<kOffset>(o) * inv_sum);
    float* factors = attention::half_partial_factors(params.lse_partial, (int64_t)2 * params.num_sm_parts * params.s_q * params.h_q);
    if (row.exists && (tile::lane_id() & 3) == 0) factors[2 * index + half] = attention::inverse_power_of_two(factor);
    fp16_t* dst = reinterpret_cast<fp16_t*>(params.o_partial) + index * Config::kHeadDimV + 256 * half;
    store_row<fp16_t, kOffset>(row.exists ? dst : nullptr, [&](int k) { return o[k] * (inv_sum * factor); });
  } else {
    bf16_t* dst = reinterpret_cast<bf16_t*>(params.out) + req * params.out_stride_batch +
                  row.token * params.out_stride_token + row.head * params.out_stride_head + 256 * half;
    store_row<bf16_t, kOffset>(row.exists ? dst : nullptr, [&](int k) { return attention::normalised(o[k], inv_sum); });
  }
}

template <class Config>
__device__ __forceinline__ void compute_output(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem, int half) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float o[128];
  static_assert(Config::kStages == 2, "the block after the next takes the place of the one before");
  Dequantizer<Config> dequantizer{{smem}, half};
  dequantizer.copy(0);
#pragma unroll 1
  for (int block = 0; block < 2; block++) dequantizer.next({block, 0}, block ^ 1);
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int block, end_block;
    {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
    }
    const bool empty = block == end_block;
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.0f;
    for (; block < end_block; block++) {
      wait_for_half<Config>(smem, ring, half);
      tile::wait(smem_addr(&smem.p_full[half]), parity);
      parity ^= 1;
      const int row = tile::fragment_row_again();
      attention::rescale_output(smem.rescale[row], smem.rescale[row + 8], o);
      start_product(o, smem_addr(smem.p), smem_addr(smem.k[ring.stage][4 * half]));
      ptx::wgmma_wait_group<0>();
      leave_half<Config>(smem, ring, half);
      // The last block's row factors are kept until inv_sum has been read.
      if (block + 1 < end_block) arrive_once_per_warp(smem_addr(&smem.p_empty));
      ring.advance();
      auto ahead = ring;
      ahead.advance();
      dequantizer.next(ahead, parity);
    }
    float inv_sum0 = 0.0f, inv_sum1 = 0.0f;
    if (!empty) {
      inv_sum0 = smem.inv_sum[tile::fragment_row_again()];
      inv_sum1 = smem.inv_sum[tile::fragment_row_again() + 8];
      arrive_once_per_warp(smem_addr(&smem.p_empty));
    }
    const int slot = attention::slot_of(plan, req);
    const int row = tile::fragment_row_again();
    store_output_row<Config, 0>(params, half, slot, req, row, o, inv_sum0);
    store_output_row<Config, 2>(params, half, slot, req, row + 8, o, inv_sum1);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    for (int half = 0; half < 2; half++) {
      ptx::mbarrier_init(smem_addr(&smem.k_full[stage][half]), 8);
      ptx::mbarrier_init(smem_addr(&smem.k_empty[stage][half]), 4 * Config::kClusterX);
    }
  }
  ptx::mbarrier_init(smem_addr(&smem.names_full), 4);
  ptx::mbarrier_init(smem_addr(&smem.names_empty), 8);
  for (int half = 0; half < 2; half++) ptx::mbarrier_init(smem_addr(&smem.p_full[half]), 4);
  ptx::mbarrier_init(smem_addr(&smem.p_empty), 8);
  ptx::fence_mbarrier_init();
}

__device__ __forceinline__ void sync_cluster() {
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

template <class Config>
__device__ __forceinline__ void kernel(const SparseDecodeParams& params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  Storage& smem = *reinterpret_cast<Storage*>(dynamic_smem);
  FLASHMLA_ASSERT(smem_addr(dynamic_smem) % 1024 == 0);
  if (threadIdx.x == 0) init_barriers<Config>(smem);
  if (params.metadata == nullptr && threadIdx.x == 0)
    smem.plan = attention::whole_part_plan(blockIdx.z, params.num_sm_parts, params.batch);
  ptx::griddepcontrol_wait();
  // After the wait: whatever this grid was told (metadata), its dependents may read before theirs.
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    if (params.metadata != nullptr)
      smem.plan = attention::load_part_plan(params.metadata, blockIdx.z, params.num_sm_parts, params.batch);
    // Of the cluster: its CTAs walk over the same blocks, also where causal rows of the first need fewer.
    const int blocks_to_last = Config::kClusterX - 1 - blockIdx.x % Config::kClusterX;
    const QueryRow last = query_row<Config>(params, Config::kRows * (1 + blocks_to_last) - 1);
    smem.plan.last_token = min(last.token, params.s_q - 1);
  }
  __syncthreads();
  if constexpr (Config::kCrossover) sync_cluster();  // the other CTA's barriers are there
  const PartPlan& plan = smem.plan;  // read where needed: registers are scarce in every role
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    if constexpr (Config::kScoreRegisters > 128)
      ptx::setmaxnreg_inc<Config::kScoreRegisters>();
    else
      ptx::setmaxnreg_dec<Config::kScoreRegisters>();
    compute_scores<Config>(params, plan, smem);
  } else if (group < 3) {
    ptx::setmaxnreg_inc<Config::kOutputRegisters>();
    compute_output<Config>(params, plan, smem, group - 1);
  } else {
    ptx::setmaxnreg_dec<Config::kDequantRegisters>();
    dequantize<Config>(params, plan, smem);
  }
  if constexpr (Config::kCrossover) sync_cluster();  // nothing is on its way to this CTA any more
}

}  // namespace flashmla::sparse_decode
