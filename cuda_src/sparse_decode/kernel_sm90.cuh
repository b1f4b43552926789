// MLA decode over an FP8 cache on Hopper. Sparse: every query token attends to the cache slots that its index list names.
// Paged (dense): to the tokens of its request, by a block table. In blocks of 64; out = softmax(scale Q K^T) V, where V is
// the first 512 dims of the dequantized K.
//
// Method: FlashMLA's FP8 sparse decode on the pipeline of dense_decode: one warpgroup turns gathered e4m3 rows into the
// bf16 tiles that the copy engine brings there. Crossover: two CTAs of a cluster, with different heads of one query token
// (paged: with any rows), each dequantize half of a block and send it to the other; without it, each CTA dequantizes every
// token it needs.
//
// grid    sparse: (ceil(h_q / 64), s_q, num_sm_parts); paged: (ceil(s_q h_q / 64), 1, num_sm_parts)
// block   384 threads, one CTA an SM; cluster of 2 along x with the crossover, else none
// roles   warpgroup 0  S = Q K^T, masking, softmax, row sums, log-sum-exp, sink; output half 0: O[:, 0:256] += P V
//         warpgroup 1  output half 1: O[:, 256:512] += P V
//         warpgroup 2  dequantize: gathers 16 (crossover: 8) tokens a warp, e4m3 x scale to bf16, swizzled tiles here and
//                      (crossover) in the other CTA, validity bits
// order   Warpgroup 0 issues Q K^T (n + 1), then its P V (n) with P in registers, and is at the softmax of n + 1 while the
//         latter runs. Warpgroup 1 starts its P V (n) as soon as P (n) is in shared memory and so leaves its half of the
//         stage first: half 1 is dequantized before half 0.
//
// barrier       arrivals    armed by     waited on by
// k_full[s][h]  4 (warps)   dequantize   warpgroup 0, h    dims 0-255 (h = 0), or the others, of a block are in stage s;
//               + the other CTA's tokens (32 x dims x 2 bytes) with the crossover; with h = 1 also the validity bits
// k_empty[s][h] 4 (warps)   warpgr. h    dequantize        P V of the block in stage s is done; 8 with the crossover: the
//               other CTA's warpgroup h too, for its stage is written from here
// p_full        4 (warps)   warpgr. 0    warpgroup 1       p, rescale, inv_sum may be read
// p_empty       4 (warps)   warpgr. 1    warpgroup 0       p, rescale, inv_sum have been read
#pragma once
#include "attention/epilogue.cuh"
#include "attention/online_softmax.cuh"
#include "attention/output_tile.cuh"
#include "attention/split.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/bar.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/st_async.cuh"
#include "ptx/wgmma.cuh"
#include "sparse_decode/config.cuh"
#include "tile/e4m3.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

using attention::PartPlan;
using tile::arrive_once_per_warp;
using tile::smem_addr;

constexpr uint32_t kScoreBarrier = 1;
constexpr unsigned kFullWarp = 0xffffffffu;

// A query row of this CTA: a head of one query token, or (paged, where tokens share their keys) of any.
struct QueryRow {
  int token, head;
  bool exists;
};
template <class Config>
__device__ __forceinline__ QueryRow query_row(const SparseDecodeParams& params, int local_row) {
  const int row = blockIdx.x * Config::kRows + local_row;
  if constexpr (!Config::kPaged) return {(int)blockIdx.y, row, row < params.h_q};
  const int token = divide_by_magic(row, params.h_q_magic, params.h_q_shift);
  return {token, row - token * params.h_q, token < params.s_q};
}

// Causal: query token i of s_q sees seqlen - s_q + i + 1 tokens.
__device__ __forceinline__ int visible_tokens(const SparseDecodeParams& params, int seqlen, int token) {
  return params.causal ? min(seqlen, seqlen - params.s_q + token + 1) : seqlen;
}

__device__ __forceinline__ int load_seqlen(const SparseDecodeParams& params, int req) {
  return min(max(__ldg(params.cache_seqlens + req), 0), params.max_seqlen);
}

// Entries of a list that count for a request.
__device__ __forceinline__ int list_length(const SparseKeys& keys, int req) {
  return keys.topk_length == nullptr ? keys.topk : min(max(__ldg(keys.topk_length + req), 0), keys.topk);
}

// The blocks of a request that this CTA works on. Sparse: first come the blocks of the main list, then the extra ones.
struct Fragment {
  int main_blocks;
  int begin_block, end_block, slot;
};
template <class Config>
__device__ __forceinline__ Fragment load_fragment(const SparseDecodeParams& params, const PartPlan& plan, int req) {
  attention::Fragment f;
  int main_blocks;
  if constexpr (Config::kPaged) {
    const int seqlen = load_seqlen(params, req);
    f = attention::fragment_of(plan, req, seqlen, visible_tokens(params, seqlen, plan.last_token));
    main_blocks = ceil_div(seqlen, attention::kKvBlock);
  } else {
    main_blocks = ceil_div(list_length(params.main, req), attention::kKvBlock);
    const int blocks = main_blocks + ceil_div(list_length(params.extra, req), attention::kKvBlock);
    f = attention::fragment_of(plan, req, blocks * attention::kKvBlock, blocks * attention::kKvBlock);
  }
  return {main_blocks, f.begin_block, f.end_block, params.o_partial == nullptr ? -1 : f.slot};
}

// ---- dequantize -------------------------------------------------------------------------------------------------
// Loads are unconditional, for a value that is loaded or else something is loaded elsewhere and moved, which waits for it:
// what does not exist is read here.
__device__ const int32_t kNoIndex[1] = {-1};
__device__ const uint4 kNoToken[41] = {};  // 656 zero bytes: codes, scales and RoPE of a token that becomes zeros

// What names a token: its index (sparse) or page (paged), negative if there is none. It is loaded a block before it is
// looked at, so that nothing waits for it.
struct TokenName {
  int32_t index;
  int32_t detail;   // sparse: 1 for the extra list; paged: the place in the page, negative if there is no token
  int32_t request;  // paged: the page of a contiguous cache
};

// Walks over the blocks of this CTA, in order, across requests, with one token of each block for every lane.
template <class Config>
struct TokenCursor {
  const SparseDecodeParams& params;
  const PartPlan& plan;
  const int in_block;  // this lane's token
  int req, block, end_block;
  int main_blocks;       // sparse: the blocks before the extra list
  const int32_t* entry;  // sparse: this lane's entry of the list
  int left;              // sparse: entries of the list from that one on; paged: tokens of the request

  __device__ __forceinline__ TokenCursor(const SparseDecodeParams& params, const PartPlan& plan, int in_block)
      : params(params), plan(plan), in_block(in_block), req(plan.begin_req - 1) {
    next_request();
  }
  __device__ __forceinline__ bool at_end() const { return req > plan.end_req; }
  __device__ __forceinline__ bool in_extra() const { return !Config::kPaged && block >= main_blocks; }
  __device__ __forceinline__ void next() {
    block++;
    if (block >= end_block) {
      next_request();
    } else if (!Config::kPaged) {
      entry += attention::kKvBlock;
      left -= attention::kKvBlock;
      if (block == main_blocks) enter_list();
    }
  }
  __device__ __forceinline__ void next_request() {
    while (++req <= plan.end_req) {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
      main_blocks = fragment.main_blocks;
      if (block < end_block) break;
    }
    if (at_end()) return;
    if constexpr (Config::kPaged)
      left = load_seqlen(params, req);
    else
      enter_list();
  }
  __device__ __forceinline__ void enter_list() {
    const SparseKeys& keys = in_extra() ? params.extra : params.main;
    const int first = (block - (in_extra() ? main_blocks : 0)) * attention::kKvBlock + in_block;
    entry = keys.indices + req * keys.indices_stride_batch + blockIdx.y * keys.indices_stride_token + first;
    left = list_length(keys, req) - first;
  }
  __device__ __forceinline__ TokenName load_name() const {
    const int32_t* at = kNoIndex;
    if constexpr (Config::kPaged) {
      const int position = block * attention::kKvBlock + in_block;
      const int page = divide_by_magic(position, params.main.page_size_magic, params.main.page_size_shift);
      const bool exists = !at_end() && position < left;
      if (exists && params.block_table != nullptr) at = params.block_table + req * params.block_table_stride + page;
      return {ptx::ld_global_nc(at), exists ? position - page * params.main.page_size : -1, req};
    } else {
      if (!at_end() && left > 0) at = entry;
      return {ptx::ld_global_nc(at), in_extra(), 0};
    }
  }
};

// Where a token's codes and scales lie; in kNoToken if it does not exist.
struct TokenAddress {
  const uint8_t* row;
  const uint8_t* scales;
  __device__ __forceinline__ bool exists() const { return row != reinterpret_cast<const uint8_t*>(kNoToken); }
};
template <class Config>
__device__ __forceinline__ TokenAddress locate(const SparseKeys& keys, int page, int place) {
  using Format = typename Config::Format;
  const uint8_t* none = reinterpret_cast<const uint8_t*>(kNoToken);
  if (page < 0 || page >= keys.num_pages || place < 0) return {none, none};
  const uint8_t* start = keys.cache + page * keys.page_stride;
  return {start + Format::row_offset(place), start + Format::scale_offset(place, keys.page_size)};
}
template <class Config>
__device__ __forceinline__ TokenAddress locate(const SparseKeys& keys, int index) {
  const int page = divide_by_magic(max(index, 0), keys.page_size_magic, keys.page_size_shift);
  return locate<Config>(keys, index < 0 ? -1 : page, index - page * keys.page_size);
}
template <class Config>
__device__ __forceinline__ TokenAddress locate(const SparseDecodeParams& params, const TokenName& name) {
  if constexpr (Config::kPaged)
    return locate<Config>(params.main, params.block_table == nullptr ? name.request : name.index, name.detail);
  if (name.detail) return locate<Config>(params.extra, name.index);
  return locate<Config>(params.main, name.index);
}

// What lane `lane` holds.
template <class Format>
__device__ __forceinline__ TokenAddress shuffle(const TokenAddress& at, int lane) {
  const auto from = [&](const uint8_t* p) {
    return reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(p), lane));
  };
  return {from(at.row), Format::kScalesInRow ? nullptr : from(at.scales)};
}

// Four codes to four bf16 values: exact product with the float32 scale, rounded to float32 and then to bf16.
__device__ __forceinline__ uint2 dequantize4(uint32_t codes, float scale) {
  float x[4];
  tile::decode_e4m3x4(codes, x);
  return make_uint2(ptx::cvt_rn_bf16x2(x[0] * scale, x[1] * scale), ptx::cvt_rn_bf16x2(x[2] * scale, x[3] * scale));
}

// A lane's share of half a token (dims 0-255, or the others) as it lies in the cache. Eight lanes share a token: lane j of
// them has chunks 16 half + j and 16 half + 8 + j of 16 codes, and with half 1 also 16 bytes of RoPE.
template <class Format>
struct RawHalf {
  static constexpr int kChunks = Format::kNope / 16;
  static constexpr int kChunksPerScale = Format::kTile / 16;
  uint4 codes[2];
  uint4 rope;
  uint2 scales;  // of this half: two float32, or four bytes in x

  __device__ __forceinline__ void load(const TokenAddress& at, int half) {
    const int j = tile::lane_id() % 8;
#pragma unroll
    for (int g = 0; g < 2; g++)  // past the last chunk this reads RoPE, which is not stored
      codes[g] = ptx::ld_global_nc_v4(at.row + 16 * (16 * half + 8 * g + j));
    if (half == 1) rope = ptx::ld_global_nc_v4(at.row + Format::kRopeOffset + 16 * j);
    const uint8_t* scales_at = (Format::kScalesInRow ? at.row + Format::kNope : at.scales) + (Format::kUe8m0 ? 4 : 8) * half;
    if constexpr (Format::kUe8m0)
      scales.x = ptx::ld_global_nc(reinterpret_cast<const int32_t*>(scales_at));
    else
      scales = ptx::ld_global_nc_v2(scales_at);
  }
  static_assert(16 * 32 <= Format::kRowBytes, "all chunks of both halves lie in the row");

  // Of this lane's chunk g.
  __device__ __forceinline__ float scale(int g) const {
    if constexpr (Format::kUe8m0) {
      static_assert(kChunksPerScale == 4, "four scales a half");
      return kv_format::ue8m0_value((uint8_t)(scales.x >> (16 * g + 8 * (tile::lane_id() % 8 / 4))));
    } else {
      static_assert(kChunksPerScale == 8, "two scales a half");
      return __int_as_float(g == 0 ? scales.x : scales.y);
    }
  }

  // The token's row of this half's tiles: put(address, 16 bytes). A token that does not exist is zeros, for 0 x anything
  // must stay 0.
  template <class Put>
  __device__ __forceinline__ void store(uint32_t tiles, int token, int half, Put put) const {
    const int j = tile::lane_id() % 8;
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const int chunk = 16 * half + 8 * g + j;
      if (16 * half + 8 * g + 8 > kChunks && chunk >= kChunks) continue;
      const float x = scale(g);
      const uint2 a = dequantize4(codes[g].x, x), b = dequantize4(codes[g].y, x);
      const uint2 c = dequantize4(codes[g].z, x), d = dequantize4(codes[g].w, x);
      const uint4 first = make_uint4(a.x, a.y, b.x, b.y), second = make_uint4(c.x, c.y, d.x, d.y);
      // 16 values are two 16-byte chunks of a tile row. Lanes 4-7 write another tile than lanes 0-3: they begin with the
      // second chunk, so that the eight lanes meet eight different groups of banks.
      const uint32_t tile_addr = tiles + tile::kTileBytes * (chunk / 4);
      const int even = chunk % 4 * 2, swap = j / 4;
      put(tile_addr + tile::swizzle_128b(token, even + swap), swap ? second : first);
      put(tile_addr + tile::swizzle_128b(token, even + 1 - swap), swap ? first : second);
    }
    if (half == 1)
      put(tiles + tile::kTileBytes * (Format::kNope / 64) + tile::swizzle_128b(token, j), rope);
  }
};

// The blocks of this CTA in order, half 1 of all tokens before half 0: as the stage is left. What is converted was loaded
// kAhead steps before, and its index a block before that.
template <class Config>
__device__ __forceinline__ void dequantize(const SparseDecodeParams& params, const PartPlan& plan,
                                           typename Config::Storage& smem) {
  using Format = typename Config::Format;
  constexpr int kTokens = Config::kTokensOfACta, kTokensOfAWarp = kTokens / 4;
  constexpr int kRounds = kTokensOfAWarp / 4;  // four tokens at a time, one for each group of eight lanes
  constexpr int kAhead = 4, kSteps = 2 * kRounds;
  static_assert(kSteps % kAhead == 0, "the place of a step in `raw` is a constant");
  // The fence waits for loads on their way as well. Where the next ones are not needed soon, they are asked for after it.
  constexpr bool kLoadAfterFence = kSteps == kAhead;
  const int lane = tile::lane_id(), warp = tile::warp_in_group();
  const uint32_t rank = Config::kCrossover ? ptx::cluster_ctarank() : 0;
  const uint32_t to_other = Config::kCrossover ? ptx::mapa(smem_addr(&smem), rank ^ 1) - smem_addr(&smem) : 0;
  const int first_token = kTokens * rank + kTokensOfAWarp * warp;
  // Lanes 0-15: the tokens that this warp dequantizes. Lanes 16-31: those whose validity bits it writes (the same ones
  // without the crossover), for both CTAs need the bits of all 64.
  TokenCursor<Config> cursor(params, plan, lane < 16 ? first_token + lane % kTokensOfAWarp : 16 * warp + lane % 16);
  int named = 0;  // blocks named but not converted yet
  const auto next_name = [&] {
    const TokenName name = cursor.load_name();
    if (!cursor.at_end()) {
      named++;
      cursor.next();
    }
    return name;
  };
  // All three on their way before the first is waited for.
  const TokenName first_name = next_name(), second_name = next_name();
  TokenName name = next_name();
  TokenAddress here = locate<Config>(params, first_name), next = here;
  RawHalf<Format> raw[kAhead];
  const auto load = [&](const TokenAddress& at, int step) {
    raw[step % kAhead].load(shuffle<Format>(at, 4 * (step % kRounds) + lane / 8), 1 - step / kRounds);
  };
  const auto load_ahead = [&](int step) {
    load(step + kAhead < kSteps ? here : next, (step + kAhead) % kSteps);
  };
#pragma unroll
  for (int step = 0; step < kAhead; step++) load(here, step);
  next = locate<Config>(params, second_name);

  tile::RingPosition<Config::kStages> ring;
  for (; named > 0; named--) {
    const uint32_t valid = __ballot_sync(kFullWarp, here.exists()) >> 16;
#pragma unroll
    for (int half = 1; half >= 0; half--) {
      const uint32_t full = smem_addr(&smem.k_full[ring.stage][half]);
      tile::wait(smem_addr(&smem.k_empty[ring.stage][half]), ring.phase ^ 1);
      if (half == 1 && lane == 0) smem.valid[ring.stage][warp] = valid;
#pragma unroll
      for (int round = 0; round < kRounds; round++) {
        const int step = (1 - half) * kRounds + round;
        raw[step % kAhead].store(smem_addr(smem.k[ring.stage]), first_token + 4 * round + lane / 8, half,
                                 [&](uint32_t addr, uint4 v) {
                                   ptx::st_shared_v4(addr, v);
                                   if constexpr (Config::kCrossover)
                                     ptx::st_async_v4(addr + to_other, v, full + to_other);
                                 });
        if (!kLoadAfterFence) load_ahead(step);
      }
      ptx::fence_proxy_async();
      if (Config::kCrossover && warp == 0) {
        __syncwarp();
        const int dims = half == 0 ? 256 : Format::kQk - 256;
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, (Config::kBlock - kTokens) * dims * 2);
      } else {
        arrive_once_per_warp(full);
      }
#pragma unroll
      for (int round = 0; kLoadAfterFence && round < kRounds; round++) load_ahead((1 - half) * kRounds + round);
    }
    here = next;
    next = locate<Config>(params, name);
    name = next_name();
    ring.advance();
  }
}

// Waits for half a block; what the other CTA sent must also be made visible to wgmma.
template <class Config>
__device__ __forceinline__ void wait_for_half(typename Config::Storage& smem,
                                              const tile::RingPosition<Config::kStages>& ring, int half) {
  tile::wait(smem_addr(&smem.k_full[ring.stage][half]), ring.phase);
  if constexpr (Config::kCrossover) ptx::fence_proxy_async();
}

// ---- scores -----------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void load_query(const SparseDecodeParams& params, int req, typename Config::Storage& smem) {
  ptx::bar_sync(kScoreBarrier, 128);  // every warp is done with the previous request's tiles
  const int column = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = threadIdx.x % 128 / 8 + 16 * i;
    const QueryRow at = query_row<Config>(params, row);
    const bf16_t* src = reinterpret_cast<const bf16_t*>(params.q);
    if (at.exists)
      src += req * params.q_stride_batch + at.token * params.q_stride_token + at.head * params.q_stride_head + 8 * column;
#pragma unroll
    for (int t = 0; t < Config::kTiles; t++)
      ptx::cp_async_16(smem_addr(smem.q[t]) + tile::swizzle_128b(row, column), src + 64 * t, at.exists ? 16 : 0);
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
  ptx::bar_sync(kScoreBarrier, 128);
}

// S = Q K^T for one block, half 1 of the dims first; one commit group.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[32], typename Config::Storage& smem,
                                             const tile::RingPosition<Config::kStages>& ring) {
#pragma unroll
  for (int i = 0; i < Config::kTiles; i++) {
    const int t = (i + 4) % Config::kTiles;
    if (t == 4 || t == 0) {
      wait_for_half<Config>(smem, ring, t / 4);
      ptx::wgmma_fence();
    }
    const uint64_t a = tile::k_major_desc(smem_addr(smem.q[t])), b = tile::k_major_desc(smem_addr(smem.k[ring.stage][t]));
#pragma unroll
    for (int k = 0; k < 4; k++)
      ptx::wgmma_m64n64k16_ss<bf16_t>(s, tile::advance(a, k * tile::kKMajorStepBytes),
                                      tile::advance(b, k * tile::kKMajorStepBytes), i + k > 0);
  }
  ptx::wgmma_commit_group();
}

// Tokens that do not exist do not take part.
__device__ __forceinline__ void mask_invalid(float (&s)[32], const uint16_t (&valid)[4]) {
  if ((valid[0] & valid[1] & valid[2] & valid[3]) == 0xffff) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t bits = valid[i / 2] >> (8 * (i % 2) + tile::fragment_col());
#pragma unroll
    for (int j = 0; j < 2; j++)
      if ((bits >> j & 1) == 0) s[4 * i + j] = s[4 * i + 2 + j] = -infinity();
  }
}

// 1 / row sum, and the attention sink where the request is whole; a split request meets its sink in combine.
__device__ __forceinline__ float output_factor(const SparseDecodeParams& params, const attention::RowState& state,
                                               const QueryRow& row, int slot) {
  if (state.sum == 0.0f) return 0.0f;
  if (params.attn_sink == nullptr || slot >= 0 || !row.exists) return 1.0f / state.sum;
  return 1.0f / (state.sum + ptx::ex2_approx_ftz(__ldg(params.attn_sink + row.head) * kLog2E - state.max_log2));
}

__device__ __forceinline__ void store_lse(const SparseDecodeParams& params, int slot, int req, const QueryRow& row,
                                          const attention::RowState& state) {
  if (!row.exists || (threadIdx.x & 3) != 0) return;
  const float lse_log2 = state.max_log2 + ptx::lg2_approx_ftz(state.sum);
  if (slot >= 0)
    params.lse_partial[((int64_t)slot * params.s_q + row.token) * params.h_q + row.head] = lse_log2;
  else
    params.lse[req * params.lse_stride_batch + row.head * params.lse_stride_head + row.token * params.lse_stride_token] =
        lse_log2 * kLn2;
}

// Paged: tokens past what each row sees (those past the end have no validity bit).
template <class Config>
__device__ __forceinline__ void mask_unseen(const SparseDecodeParams& params, int req, int block, const QueryRow& row0,
                                            const QueryRow& row1, float (&s)[32]) {
  const int seqlen = load_seqlen(params, req), first_col = block * Config::kBlock;
  if (first_col + Config::kBlock <= visible_tokens(params, seqlen, query_row<Config>(params, 0).token)) return;
  attention::mask_columns(s, first_col, visible_tokens(params, seqlen, row0.token),
                          visible_tokens(params, seqlen, row1.token));
}

// Masks and exponentiates the scores of one block; gives the factors for what was accumulated before.
template <class Config>
__device__ __forceinline__ void softmax(const SparseDecodeParams& params, int req, int block, const QueryRow& row0,
                                        const QueryRow& row1, const uint16_t (&valid)[4], float (&s)[32],
                                        attention::RowState& state0, attention::RowState& state1, float& rescale0,
                                        float& rescale1) {
  mask_invalid(s, valid);
  if constexpr (Config::kPaged)
    if (params.causal) mask_unseen<Config>(params, req, block, row0, row1, s);
  float max0, max1;
  attention::row_max(s, max0, max1);
  attention::update_maxima(state0, state1, max0 * params.scale_log2, max1 * params.scale_log2, rescale0, rescale1);
  attention::exponentiate(s, params.scale_log2, state0, state1);
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

template <class Config, int half, int kOffset>
__device__ __forceinline__ void store_output_row(const SparseDecodeParams& params, int slot, int req, int local_row,
                                                 const float (&o)[128], float inv_sum) {
  const QueryRow row = query_row<Config>(params, local_row);
  if (slot >= 0) {
    float* dst = params.o_partial +
                 (((int64_t)slot * params.s_q + row.token) * params.h_q + row.head) * Config::kHeadDimV + 256 * half;
    attention::store_row_f32<kOffset>(o, inv_sum, row.exists ? dst : nullptr);
  } else {
    bf16_t* dst = reinterpret_cast<bf16_t*>(params.out) + req * params.out_stride_batch +
                  row.token * params.out_stride_token + row.head * params.out_stride_head + 256 * half;
    attention::store_row_16bit<bf16_t, kOffset>(o, inv_sum, row.exists ? dst : nullptr);
  }
}

// Scores, and output half 0.
template <class Config>
__device__ __forceinline__ void compute_scores(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  const int row = tile::fragment_row();
  const QueryRow row0 = query_row<Config>(params, row), row1 = query_row<Config>(params, row + 8);
  tile::RingPosition<Config::kStages> ahead, ring;  // of the block whose scores are next, and of the one before
  uint32_t parity = 0;                              // of the block count: p_full and p_empty complete once a block
  float s[32], o[128];
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    const Fragment fragment = load_fragment<Config>(params, plan, req);
    // Rows past the last get an infinite maximum: their probabilities are zero, like their queries.
    attention::RowState state0{row0.exists ? attention::kNothing : infinity(), 0.0f};
    attention::RowState state1{row1.exists ? attention::kNothing : infinity(), 0.0f};
    float rescale0, rescale1, inv_sum0 = 0.0f, inv_sum1 = 0.0f;
    uint32_t p[4][4];
    const auto take_probabilities = [&](int block) {
      const bool last = block + 1 == fragment.end_block;
      tile::wait(smem_addr(&smem.p_empty), parity ^ 1);
      parity ^= 1;
      attention::pack_probabilities<bf16_t>(s, p);
      attention::store_probabilities(p, smem_addr(smem.p));
      if (last) {
        state0.sum = tile::quad_sum(state0.sum);
        state1.sum = tile::quad_sum(state1.sum);
        inv_sum0 = output_factor(params, state0, row0, fragment.slot);
        inv_sum1 = output_factor(params, state1, row1, fragment.slot);
      }
      if ((threadIdx.x & 3) == 0) {
        smem.rescale[row] = rescale0;
        smem.rescale[row + 8] = rescale1;
        if (last) {
          smem.inv_sum[row] = inv_sum0;
          smem.inv_sum[row + 8] = inv_sum1;
        }
      }
      arrive_once_per_warp(smem_addr(&smem.p_full));
    };
    const auto add_products = [&](bool first) {
      attention::start_product<bf16_t>(o, p, smem_addr(smem.k[ring.stage][0]), first);
    };
    const auto leave_stage = [&] {
      ptx::wgmma_wait_group<0>();
      leave_half<Config>(smem, ring, 0);
      ring.advance();
    };
    int block = fragment.begin_block;
    if (block < fragment.end_block) {
      load_query<Config>(params, req, smem);
      issue_scores<Config>(s, smem, ahead);
      ptx::wgmma_wait_group<0>();
      softmax<Config>(params, req, block, row0, row1, smem.valid[ahead.stage], s, state0, state1, rescale0, rescale1);
      ahead.advance();
      take_probabilities(block);
      for (; block + 1 < fragment.end_block; block++) {
        issue_scores<Config>(s, smem, ahead);
        add_products(block == fragment.begin_block);
        ptx::wgmma_wait_group<1>();
        softmax<Config>(params, req, block + 1, row0, row1, smem.valid[ahead.stage], s, state0, state1, rescale0,
                        rescale1);
        ahead.advance();
        leave_stage();
        take_probabilities(block + 1);
        attention::rescale_output(rescale0, rescale1, o);
      }
      add_products(block == fragment.begin_block);
      leave_stage();
    }
    store_lse(params, fragment.slot, req, row0, state0);
    store_lse(params, fragment.slot, req, row1, state1);
    store_output_row<Config, 0, 0>(params, fragment.slot, req, row, o, inv_sum0);
    store_output_row<Config, 0, 2>(params, fragment.slot, req, row + 8, o, inv_sum1);
  }
}

// Output half 1. What the loop over blocks does not need every time is derived again: registers are scarce.
template <class Config>
__device__ __forceinline__ void compute_output(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float o[128];
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int block, end_block;
    {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
    }
    const bool empty = block == end_block;
    for (bool first = true; block < end_block; block++, first = false) {
      wait_for_half<Config>(smem, ring, 1);
      tile::wait(smem_addr(&smem.p_full), parity);
      parity ^= 1;
      if (!first) {
        const int row = tile::fragment_row();
        attention::rescale_output(smem.rescale[row], smem.rescale[row + 8], o);
      }
      attention::start_product<bf16_t>(o, smem_addr(smem.p), smem_addr(smem.k[ring.stage][4]), first);
      ptx::wgmma_wait_group<0>();
      // The last block's row factors are kept until inv_sum has been read.
      if (block + 1 < end_block) arrive_once_per_warp(smem_addr(&smem.p_empty));
      leave_half<Config>(smem, ring, 1);
      ring.advance();
    }
    float inv_sum0 = 0.0f, inv_sum1 = 0.0f;
    if (!empty) {
      inv_sum0 = smem.inv_sum[tile::fragment_row_again()];
      inv_sum1 = smem.inv_sum[tile::fragment_row_again() + 8];
      arrive_once_per_warp(smem_addr(&smem.p_empty));
    }
    const int slot = load_fragment<Config>(params, plan, req).slot;
    const int row = tile::fragment_row_again();
    store_output_row<Config, 1, 0>(params, slot, req, row, o, inv_sum0);
    store_output_row<Config, 1, 2>(params, slot, req, row + 8, o, inv_sum1);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    for (int half = 0; half < 2; half++) {
      ptx::mbarrier_init(smem_addr(&smem.k_full[stage][half]), 4);
      ptx::mbarrier_init(smem_addr(&smem.k_empty[stage][half]), 4 * Config::kClusterX);
    }
  }
  ptx::mbarrier_init(smem_addr(&smem.p_full), 4);
  ptx::mbarrier_init(smem_addr(&smem.p_empty), 4);
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
  ptx::griddepcontrol_wait();
  // After the wait: whatever this grid was told (metadata), its dependents may read before theirs.
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
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
    ptx::setmaxnreg_inc<Config::kScoreRegisters>();
    compute_scores<Config>(params, plan, smem);
  } else if (group == 1) {
    ptx::setmaxnreg_dec<Config::kOutputRegisters>();
    compute_output<Config>(params, plan, smem);
  } else {
    ptx::setmaxnreg_dec<Config::kDequantRegisters>();
    dequantize<Config>(params, plan, smem);
  }
  if constexpr (Config::kCrossover) sync_cluster();  // nothing is on its way to this CTA any more
}

}  // namespace flashmla::sparse_decode
