// MLA decode over an FP8 cache on Hopper. Sparse: every query token attends to the cache slots that its index list names.
// Paged (dense): to the tokens of its request, by a block table. In blocks of 64; out = softmax(scale Q K^T) V, where V is
// the first 512 dims of the dequantized K.
//
// Method: FlashMLA's FP8 sparse decode on the pipeline of dense_decode: one warpgroup turns gathered e4m3 rows into the
// bf16 tiles that the copy engine brings there. Crossover: two CTAs of a cluster with different heads of one query token
// each dequantize half of a block and send it to the other; without it, each CTA dequantizes every token it needs.
//
// grid    sparse: (ceil(h_q / 64), s_q, num_sm_parts); paged: (ceil(s_q h_q / 64), 1, num_sm_parts)
// block   512 threads, one CTA an SM; cluster of 2 along x with the crossover, else none
// roles   warpgroup 0  dequantize: gathers 16 (crossover: 8) tokens a warp, e4m3 x scale to bf16, swizzled tiles here and
//                      (crossover) in the other CTA, validity bits
//         warpgroup 1  scores: S = Q K^T, masking, softmax, P to shared memory, row sums, log-sum-exp, sink
//         warpgroup 2  output half 0: O[:, 0:256] += P V      warpgroup 3  output half 1: O[:, 256:512] += P V
// order   as in dense_decode: half 1 is told of P (n) when Q K^T (n + 1) is nearly done
//
// barrier     arrivals    armed by      waited on by
// k_full[s]   4 (warps)   dequantize    scores, both halves   the tiles and validity bits of a block are in stage s;
//             + the other CTA's half (32 tokens x d_qk x 2 bytes) with the crossover
// k_empty[s]  8 (warps)   both halves   dequantize            P V of the block in stage s is done; 16 with the crossover:
//             the other CTA's halves too, for its stage is written from here
// p_full[h]   4 (warps)   scores        half h                p, rescale, inv_sum may be read
// p_empty     8 (warps)   both halves   scores                p, rescale, inv_sum have been read
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
// Where a token's codes and scales lie; row null: the token does not exist and is not read.
struct TokenAddress {
  const uint8_t* row;
  const uint8_t* scales;
};

template <class Config>
__device__ __forceinline__ TokenAddress locate(const SparseDecodeParams& params, int req, const Fragment& fragment,
                                               int block, int in_block) {
  using Format = typename Config::Format;
  int page, slot;
  const SparseKeys* keys = &params.main;
  if constexpr (Config::kPaged) {
    const int position = block * attention::kKvBlock + in_block;
    if (position >= load_seqlen(params, req)) return {nullptr, nullptr};
    const int entry = divide_by_magic(position, keys->page_size_magic, keys->page_size_shift);
    slot = position - entry * keys->page_size;
    page = req;
    if (params.block_table != nullptr) page = __ldg(params.block_table + req * params.block_table_stride + entry);
    if ((uint32_t)page >= (uint32_t)keys->num_pages) return {nullptr, nullptr};
  } else {
    if (block >= fragment.main_blocks) {
      keys = &params.extra;
      block -= fragment.main_blocks;
    }
    const int entry = block * attention::kKvBlock + in_block;
    if (entry >= list_length(*keys, req)) return {nullptr, nullptr};
    const int index =
        __ldg(keys->indices + req * keys->indices_stride_batch + blockIdx.y * keys->indices_stride_token + entry);
    if (index < 0) return {nullptr, nullptr};
    page = divide_by_magic(index, keys->page_size_magic, keys->page_size_shift);
    if (page >= keys->num_pages) return {nullptr, nullptr};
    slot = index - page * keys->page_size;
  }
  const uint8_t* start = keys->cache + page * keys->page_stride;
  return {start + Format::row_offset(slot), start + Format::scale_offset(slot, keys->page_size)};
}

__device__ __forceinline__ const uint8_t* shuffle_pointer(const uint8_t* p, int lane) {
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(p), lane));
}

// A lane's share of one token, as it lies in the cache. Eight lanes share a token: lane j of them has chunks j, 8 + j, ...
// of 16 codes, and 16 bytes of RoPE.
template <class Format>
struct RawToken {
  static constexpr int kChunks = Format::kNope / 16;
  static constexpr int kGroups = (kChunks + 7) / 8;
  static constexpr int kChunksPerScale = Format::kTile / 16;
  uint4 codes[kGroups];
  uint4 rope;
  float scale[kGroups];

  __device__ __forceinline__ void load(TokenAddress at) {
    const int j = tile::lane_id() % 8;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      codes[g] = make_uint4(0, 0, 0, 0);
      scale[g] = 0.0f;
    }
    rope = make_uint4(0, 0, 0, 0);
    if (at.row == nullptr) return;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const int chunk = 8 * g + j;
      if (chunk >= kChunks) continue;
      codes[g] = ptx::ld_global_nc_v4(at.row + 16 * chunk);
      const int which = chunk / kChunksPerScale;
      scale[g] = Format::kUe8m0 ? kv_format::ue8m0_value(__ldg(at.scales + which))
                                : __ldg(reinterpret_cast<const float*>(at.scales) + which);
    }
    rope = ptx::ld_global_nc_v4(at.row + Format::kRopeOffset + 16 * j);
  }
};

// Four codes to four bf16 values: exact product with the float32 scale, rounded to float32 and then to bf16.
__device__ __forceinline__ uint2 dequantize4(uint32_t codes, float scale) {
  float x[4];
  tile::decode_e4m3x4(codes, x);
  return make_uint2(ptx::cvt_rn_bf16x2(x[0] * scale, x[1] * scale), ptx::cvt_rn_bf16x2(x[2] * scale, x[3] * scale));
}

// A token's row of the tiles of one stage: put(address, 16 bytes). A token that does not exist becomes zeros, for
// 0 x anything must stay 0.
template <class Format, class Put>
__device__ __forceinline__ void store_token(const RawToken<Format>& raw, uint32_t tiles, int token, Put put) {
  const int j = tile::lane_id() % 8;
#pragma unroll
  for (int g = 0; g < RawToken<Format>::kGroups; g++) {
    const int chunk = 8 * g + j;
    if (chunk >= RawToken<Format>::kChunks) continue;
    const uint2 a = dequantize4(raw.codes[g].x, raw.scale[g]), b = dequantize4(raw.codes[g].y, raw.scale[g]);
    const uint2 c = dequantize4(raw.codes[g].z, raw.scale[g]), d = dequantize4(raw.codes[g].w, raw.scale[g]);
    const uint4 first = make_uint4(a.x, a.y, b.x, b.y), second = make_uint4(c.x, c.y, d.x, d.y);
    // 16 values are two 16-byte chunks of a tile row. Lanes 4-7 write another tile than lanes 0-3: they begin with the
    // second chunk, so that the eight lanes meet eight different groups of banks.
    const uint32_t tile_addr = tiles + tile::kTileBytes * (chunk / 4);
    const int even = chunk % 4 * 2, swap = j / 4;
    put(tile_addr + tile::swizzle_128b(token, even + swap), swap ? second : first);
    put(tile_addr + tile::swizzle_128b(token, even + 1 - swap), swap ? first : second);
  }
  put(tiles + tile::kTileBytes * (Format::kNope / 64) + tile::swizzle_128b(token, j), raw.rope);
}

// The blocks of this CTA in order; each is gathered while the one before waits for its stage.
template <class Config>
__device__ __forceinline__ void dequantize(const SparseDecodeParams& params, const PartPlan& plan,
                                           typename Config::Storage& smem) {
  using Format = typename Config::Format;
  constexpr int kTokens = Config::kTokensOfACta, kTokensOfAWarp = kTokens / 4, kRounds = kTokensOfAWarp / 4;
  const int lane = tile::lane_id(), warp = tile::warp_in_group();
  const uint32_t rank = Config::kCrossover ? ptx::cluster_ctarank() : 0;
  const int first_token = kTokens * rank + kTokensOfAWarp * warp;
  tile::RingPosition<Config::kStages> ring;
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    const Fragment fragment = load_fragment<Config>(params, plan, req);
    for (int block = fragment.begin_block; block < fragment.end_block; block++) {
      // Lanes 0-15: the tokens that this warp dequantizes. Lanes 16-31: those whose validity bits it writes (the same
      // ones without the crossover), for both CTAs need the bits of all 64.
      const int token = lane < 16 ? first_token + lane % kTokensOfAWarp : 16 * warp + lane % 16;
      const TokenAddress mine = locate<Config>(params, req, fragment, block, token);
      const uint32_t valid = __ballot_sync(kFullWarp, mine.row != nullptr) >> 16;
      RawToken<Format> raw[2];
      const auto load = [&](int i) {  // four tokens at a time, one for each group of eight lanes
        const int source = 4 * i + lane / 8;
        raw[i % 2].load({shuffle_pointer(mine.row, source), shuffle_pointer(mine.scales, source)});
      };
      load(0);
      tile::wait(smem_addr(&smem.k_empty[ring.stage]), ring.phase ^ 1);
      if (lane == 0) smem.valid[ring.stage][warp] = valid;
      const uint32_t full = smem_addr(&smem.k_full[ring.stage]);
#pragma unroll
      for (int i = 0; i < kRounds; i++) {
        if (i + 1 < kRounds) load(i + 1);
        store_token<Format>(raw[i % 2], smem_addr(smem.k[ring.stage]), first_token + 4 * i + lane / 8,
                            [&](uint32_t addr, uint4 v) {
                              ptx::st_shared_v4(addr, v);
                              if constexpr (Config::kCrossover)
                                ptx::st_async_v4(ptx::mapa(addr, rank ^ 1), v, ptx::mapa(full, rank ^ 1));
                            });
      }
      ptx::fence_proxy_async();
      if (Config::kCrossover && warp == 0) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, (Config::kBlock - kTokens) * Format::kQk * 2);
      } else {
        arrive_once_per_warp(full);
      }
      ring.advance();
    }
  }
}

// Waits for a block; what the other CTA sent must also be made visible to wgmma.
template <class Config>
__device__ __forceinline__ void wait_for_block(typename Config::Storage& smem,
                                               const tile::RingPosition<Config::kStages>& ring) {
  tile::wait(smem_addr(&smem.k_full[ring.stage]), ring.phase);
  if constexpr (Config::kCrossover) ptx::fence_proxy_async();
}

// ---- scores -----------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void load_query(const SparseDecodeParams& params, int req, typename Config::Storage& smem) {
  ptx::bar_sync(kScoreBarrier, 128);  // every warp is done with the previous request's tiles
  const int chunk = threadIdx.x % 8;
#pragma unroll 2
  for (int row = threadIdx.x % 128 / 8; row < Config::kRows; row += 16) {
    const QueryRow at = query_row<Config>(params, row);
    const uint4* src = reinterpret_cast<const uint4*>(
        reinterpret_cast<const bf16_t*>(params.q) + req * params.q_stride_batch + at.token * params.q_stride_token +
        at.head * params.q_stride_head);
#pragma unroll
    for (int t = 0; t < Config::kTiles; t++)
      ptx::st_shared_v4(smem_addr(smem.q[t]) + tile::swizzle_128b(row, chunk),
                        at.exists ? ptx::ld_global_nc_v4(src + 8 * t + chunk) : make_uint4(0, 0, 0, 0));
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(kScoreBarrier, 128);
}

// S = Q K^T for one block. Two commit groups: all tiles but the last, and the last.
template <class Config>
__device__ __forceinline__ void issue_scores(float (&s)[32], typename Config::Storage& smem, int stage) {
  ptx::wgmma_fence();
#pragma unroll
  for (int t = 0; t < Config::kTiles; t++) {
    if (t == Config::kTiles - 1) ptx::wgmma_commit_group();
    const uint64_t a = tile::k_major_desc(smem_addr(smem.q[t])), b = tile::k_major_desc(smem_addr(smem.k[stage][t]));
#pragma unroll
    for (int k = 0; k < 4; k++)
      ptx::wgmma_m64n64k16_ss<bf16_t>(s, tile::advance(a, k * tile::kKMajorStepBytes),
                                      tile::advance(b, k * tile::kKMajorStepBytes), t + k > 0);
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

template <class Config>
__device__ __forceinline__ void compute_scores(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  const int row = tile::fragment_row();
  const QueryRow row0 = query_row<Config>(params, row), row1 = query_row<Config>(params, row + 8);
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float s[32];
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    const Fragment fragment = load_fragment<Config>(params, plan, req);
    // Rows past the last get an infinite maximum: their probabilities are zero, like their queries.
    attention::RowState state0{row0.exists ? attention::kNothing : infinity(), 0.0f};
    attention::RowState state1{row1.exists ? attention::kNothing : infinity(), 0.0f};
    if (fragment.begin_block < fragment.end_block) load_query<Config>(params, req, smem);
    bool pending = false;  // P of the block before is not announced to output half 1 yet
    for (int block = fragment.begin_block; block < fragment.end_block; block++) {
      const bool last = block + 1 == fragment.end_block;
      wait_for_block<Config>(smem, ring);
      issue_scores<Config>(s, smem, ring.stage);
      ptx::wgmma_wait_group<1>();
      if (pending) arrive_once_per_warp(smem_addr(&smem.p_full[1]));
      ptx::wgmma_wait_group<0>();

      mask_invalid(s, smem.valid[ring.stage]);
      if constexpr (Config::kPaged)
        if (params.causal) mask_unseen<Config>(params, req, block, row0, row1, s);
      ring.advance();
      float max0, max1;
      attention::row_max(s, max0, max1);
      const float rescale0 = state0.update(max0 * params.scale_log2);
      const float rescale1 = state1.update(max1 * params.scale_log2);
      attention::exponentiate(s, params.scale_log2, state0, state1);

      tile::wait(smem_addr(&smem.p_empty), parity ^ 1);
      parity ^= 1;
      attention::store_probabilities<bf16_t>(s, smem_addr(smem.p));
      if (last) {
        state0.sum = tile::quad_sum(state0.sum);
        state1.sum = tile::quad_sum(state1.sum);
      }
      if ((threadIdx.x & 3) == 0) {
        smem.rescale[row] = rescale0;
        smem.rescale[row + 8] = rescale1;
        if (last) {
          smem.inv_sum[row] = output_factor(params, state0, row0, fragment.slot);
          smem.inv_sum[row + 8] = output_factor(params, state1, row1, fragment.slot);
        }
      }
      arrive_once_per_warp(smem_addr(&smem.p_full[0]));
      pending = !last;
      if (last) arrive_once_per_warp(smem_addr(&smem.p_full[1]));
    }
    store_lse(params, fragment.slot, req, row0, state0);
    store_lse(params, fragment.slot, req, row1, state1);
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
template <class Config, int half, int kOffset>
__device__ __forceinline__ void store_output_row(const SparseDecodeParams& params, int slot, int req, int local_row,
                                                 const float (&o)[2][64], float inv_sum) {
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

template <class Config, int half>
__device__ __forceinline__ void compute_output(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t parity = 0;  // of the block count: p_full and p_empty complete once a block
  float o[2][64];       // columns 0-127 and 128-255 of this half
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int block, end_block;
    {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      block = fragment.begin_block;
      end_block = fragment.end_block;
    }
    const bool empty = block == end_block;
    for (bool first = true; block < end_block; block++, first = false) {
      wait_for_block<Config>(smem, ring);
      tile::wait(smem_addr(&smem.p_full[half]), parity);
      parity ^= 1;
      attention::start_block<bf16_t>(o, smem_addr(smem.p), smem.rescale, smem_addr(smem.k[ring.stage][4 * half]), first,
                                     [&] {
                                       // The last block's row factors are kept until inv_sum has been read.
                                       if (block + 1 < end_block) arrive_once_per_warp(smem_addr(&smem.p_empty));
                                     });
      ptx::wgmma_wait_group<0>();
      arrive_once_per_warp(smem_addr(&smem.k_empty[ring.stage]));
      if (Config::kCrossover && tile::lane_id() == 0)
        ptx::mbarrier_arrive_cluster(ptx::mapa(smem_addr(&smem.k_empty[ring.stage]), ptx::cluster_ctarank() ^ 1));
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
    store_output_row<Config, half, 0>(params, slot, req, row, o, inv_sum0);
    store_output_row<Config, half, 2>(params, slot, req, row + 8, o, inv_sum1);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    ptx::mbarrier_init(smem_addr(&smem.k_full[stage]), 4);
    ptx::mbarrier_init(smem_addr(&smem.k_empty[stage]), 8 * Config::kClusterX);
  }
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
  ptx::griddepcontrol_wait();
  // After the wait: whatever this grid was told (metadata), its dependents may read before theirs.
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    smem.plan = attention::load_part_plan(params.metadata, blockIdx.z, params.num_sm_parts, params.batch);
    smem.plan.last_token = min(query_row<Config>(params, Config::kRows - 1).token, params.s_q - 1);
  }
  __syncthreads();
  if constexpr (Config::kCrossover) sync_cluster();  // the other CTA's barriers are there
  const PartPlan& plan = smem.plan;  // read where needed: registers are scarce in every role
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_dec<Config::kDequantRegisters>();
    dequantize<Config>(params, plan, smem);
  } else if (group == 1) {
    ptx::setmaxnreg_dec<Config::kScoreRegisters>();
    compute_scores<Config>(params, plan, smem);
  } else {
    ptx::setmaxnreg_inc<Config::kOutputRegisters>();
    if (group == 2)
      compute_output<Config, 0>(params, plan, smem);
    else
      compute_output<Config, 1>(params, plan, smem);
  }
  if constexpr (Config::kCrossover) sync_cluster();  // nothing is on its way to this CTA any more
}

}  // namespace flashmla::sparse_decode
