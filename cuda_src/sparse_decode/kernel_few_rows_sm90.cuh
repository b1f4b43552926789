// MLA decode over an FP8 cache for few query rows, 16 a CTA, where reading the cache is what costs. Keys by index lists or by
// a block table; out = softmax(scale Q K^T) V, where V is the first 512 dims of the dequantized K. In units of 32 tokens.
//
// Method: mma.sync with the 16 rows as its 16 rows, so that no row is padding, on codes that go from the cache's bytes in
// shared memory to operand registers, e4m3 -> fp16, exactly. Scales stay outside of the products. Of a group of four warps,
// warp j has the dims of scale j, 128 j to 128 j + 127, in both products, and 16 of the RoPE dims:
//   scores  each warp multiplies its dims, applies scale j of each token, and the four parts are added through shared memory,
//           warp w those of tile w of 8 tokens. Q is fp16 relative to a power of two for each row; bf16 fits into it.
//   output  warp j weighs its codes by P_j(t) = 2^(s(t) + log2 scale_j(t) - ref_j), in fp16, with a reference ref_j of its
//           own for each row. So P_j fits whatever the scales are. The row sum, of 2^(s(t) - sum_ref), is kept apart: warp w
//           adds the tokens of tile w of each unit. In the end O_j 2^(ref_j - lse) is the output.
// Groups take units in turn and add their outputs at the end of a request.
//
// grid    indices: (ceil(h_q / 16), s_q, num_sm_parts); paged: (ceil(s_q h_q / 16), 1, num_sm_parts)
// block   512 threads, one CTA an SM
// roles   warps 0-11   three groups of four: scores and output of every third unit
//         warps 12-13  find the tokens of the first and second half of each block, a unit each, and have the copy engine
//                      bring them, as they lie in the cache, runs of neighbours by one copy
//         warps 14-15  end at once; registers move by whole warpgroups
//
// barrier    arrivals    armed by     waited on by
// full[s]    1           a producer   a group       a unit is in stage s, + the bytes of its tokens, and its validity bits
// empty[s]   4 (warps)   a group      a producer    the unit in stage s has been used
// merge      12 (warps)  all groups   all groups    at the end of a request: sums or outputs are written, or outputs read
// lap[s]     no barrier; a group waits for its lap before it waits on full[s]. For a stage serves another group every lap,
//            and one that is ahead would take the unit before its own, still on its way, for a full stage: parities repeat.
// 1 + group  128         a group      a group       bar.sync, by turns: the parts, and the totals, of a unit's scores are
//                                                   written (and, where a request begins, the magnitudes of Q's rows)
//
// Order of dims and tokens: a product does not mind the order of its sum, so lanes take 16 bytes where the fragments want
// pieces. Lane c of a quad has dims 16 c to 16 c + 15 of each 64 of Q and K, as four steps. Column n of a tile of 8 tokens is
// token bit_reverse(n). Column n of output tile d is dim 16 (n / 2 + n % 2 * 4) + d. So the eight lanes that load together
// always meet eight different groups of banks, and a lane ends with 16 adjacent dims.
#pragma once
#include "attention/epilogue.cuh"
#include "attention/online_softmax.cuh"
#include "attention/split.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async_bulk_linear.cuh"
#include "ptx/cvt_fp8_halves.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/ld_st_signal.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/opaque.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/prmt.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "sparse_decode/config_few_rows.cuh"
#include "sparse_decode/keys.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

using tile::arrive_once_per_warp;
using tile::smem_addr;

constexpr uint32_t kGroupBarrier = 1;  // + the group

// Weights are at most 2^kWeightLimit, which fp16 holds; a reference that moves leaves room for growing by 2^kWeightRoom.
constexpr float kWeightLimit = 15.0f, kWeightRoom = 7.0f;
constexpr float kSumLimit = 60.0f;  // of a summand, in log2: float32 has no other worry than its range

// Stages of the units that somebody takes: every kStep-th, from `stage` on.
template <int kStages, int kStep>
struct UnitRing {
  int stage;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    stage += kStep;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

// A query row in global memory; rows past the last give any.
template <class Config>
__device__ __forceinline__ const bf16_t* query_pointer(const SparseDecodeParams& params, int req, const QueryRow& row) {
  const bf16_t* q = reinterpret_cast<const bf16_t*>(params.q) + req * params.q_stride_batch;
  return row.exists ? q + row.token * params.q_stride_token + row.head * params.q_stride_head : q;
}

// The lane, worked out anew: for use outside of the loop over units, whose registers are all taken.
__device__ __forceinline__ int lane_again() { return ptx::tid_x() & 31; }

// Of three bits: which token of a tile is column n, and which column is token n.
__device__ __forceinline__ int bit_reverse(int n) { return (n & 1) << 2 | (n & 2) | n >> 2; }

// ---- tokens -----------------------------------------------------------------------------------------------------
// Brings half of the CTA's rows of Q of a request to the L2.
template <class Config>
__device__ __forceinline__ void prefetch_query(const SparseDecodeParams& params, int req, int half) {
  constexpr int kPiece = Config::Format::kQk / 4;
  const QueryRow row = query_row<Config>(params, Config::kRows / 2 * half + tile::lane_id() / 4);
  const bf16_t* q = query_pointer<Config>(params, req, row) + kPiece * (tile::lane_id() % 4);
#pragma unroll
  for (int dim = 0; dim < kPiece; dim += 64) ptx::prefetch_l2(q + dim);
}

// Rows of zeros for tokens that do not exist: 0 x anything must stay 0.
template <class Format>
__device__ __forceinline__ void clear_tokens(uint32_t which, uint32_t dst) {
  for (; which != 0; which &= which - 1) {
    const uint32_t row = dst + Format::kRowBytes * (__ffs(which) - 1);
    for (int i = tile::lane_id(); i < Format::kRowBytes / 16; i += 32)
      ptx::st_shared_v4(row + 16 * i, make_uint4(0, 0, 0, 0));
  }
  ptx::fence_proxy_async();  // the next to write here is the copy engine
}

// A unit into its stage. row: where this lane's token lies, or null.
template <class Config>
__device__ __forceinline__ void copy_unit(const uint8_t* row, typename Config::Storage& smem, int stage, uint32_t lap) {
  constexpr int kRowBytes = Config::Format::kRowBytes;
  const int lane = tile::lane_id();
  const uint32_t full = smem_addr(&smem.full[stage]), dst = smem_addr(smem.tokens[stage]);
  const uint32_t valid = __ballot_sync(kFullWarp, row != nullptr);
  const uint64_t before = __shfl_up_sync(kFullWarp, reinterpret_cast<uint64_t>(row), 1);
  const bool follows = reinterpret_cast<uint64_t>(row) == before + kRowBytes;
  const uint32_t runs = __ballot_sync(kFullWarp, !follows);  // where they begin
  if (valid != kFullWarp && valid != 0) clear_tokens<typename Config::Format>(~valid, dst);
  if (lane == 0) {
    smem.valid[stage] = valid;
    ptx::st_relaxed_cta_shared(smem_addr(&smem.lap[stage]), lap);
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kRowBytes * __popc(valid));
  __syncwarp();
  if (row == nullptr || follows) return;
  const uint32_t later_runs = runs >> lane >> 1;
  const int tokens = later_runs == 0 ? 32 - lane : __ffs(later_runs);
  ptx::cp_async_bulk(dst + kRowBytes * lane, row, kRowBytes * tokens, full);
}

// A producer warp: half `half` of every block. Names of tokens are loaded a block ahead.
template <class Config>
__device__ __forceinline__ void load_tokens(const SparseDecodeParams& params, const PartPlan& plan,
                                            typename Config::Storage& smem, int half) {
  TokenCursor<Config> cursor(params, plan, Config::kUnit * half + tile::lane_id());
  UnitRing<Config::kStages, Config::kProducerWarps> ring{half};
  int prefetched = -1;
  TokenName name = cursor.load_name();
  while (!cursor.at_end()) {
    if (cursor.req != prefetched) prefetch_query<Config>(params, prefetched = cursor.req, half);
    const uint8_t* row = locate<Config>(params, name).row;
    cursor.next();
    name = cursor.load_name();
    tile::wait(smem_addr(&smem.empty[ring.stage]), ring.phase ^ 1);
    copy_unit<Config>(row, smem, ring.stage, ring.phase);
    __syncwarp();
    ring.advance();
  }
}

// ---- scores -----------------------------------------------------------------------------------------------------
// The warp's dims of the 16 rows become A fragments: e4m3's in registers, those of RoPE in shared memory. Rows are relative
// to a power of two each; products times q_unit are scores in log2.
using Query = uint32_t[8][4];

// The largest magnitude of the quad's parts of a row, as the bits of a bf16.
template <int kWords>
__device__ __forceinline__ uint32_t row_magnitude(const uint32_t (&words)[kWords]) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kWords; i++) magnitude = max(magnitude, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
  magnitude = max(magnitude, __shfl_xor_sync(kFullWarp, magnitude, 1));
  return max(magnitude, __shfl_xor_sync(kFullWarp, magnitude, 2));
}

// Two bf16 values times a power of two, as Element.
template <class Element>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float factor) {
  return tile::pack<Element>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000) * factor);
}

template <class Config>
__device__ __forceinline__ void load_query(const SparseDecodeParams& params, int req, typename Config::Storage& smem,
                                           int group, int warp, Query& q) {
  const int g = lane_again() / 4, c = lane_again() % 4;
  uint32_t words[2][18];  // dims 64 h + 16 c to 64 h + 16 c + 15 of the warp's, h = 0, 1, then 4 of RoPE
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const QueryRow row = query_row<Config>(params, g + 8 * r);
    const bf16_t* src = query_pointer<Config>(params, req, row);
    const uint32_t keep = row.exists ? ~0u : 0u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 v = ptx::ld_global_nc_v4(src + 128 * warp + 64 * (i / 2) + 16 * c + 8 * (i % 2));
      words[r][4 * i] = v.x & keep;
      words[r][4 * i + 1] = v.y & keep;
      words[r][4 * i + 2] = v.z & keep;
      words[r][4 * i + 3] = v.w & keep;
    }
    const uint2 rope = ptx::ld_global_nc_v2(src + Config::Format::kNope + 16 * warp + 4 * c);
    words[r][16] = rope.x & keep;
    words[r][17] = rope.y & keep;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint32_t magnitude = row_magnitude(words[r]);
    if (c == 0) smem.magnitude[4 * group + warp][g + 8 * r] = magnitude;
  }
  ptx::bar_sync(kGroupBarrier + group, 128);
  uint32_t rope[4];
  float unit[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    uint32_t magnitude = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) magnitude = max(magnitude, smem.magnitude[4 * group + i][g + 8 * r]);
    const int exponent = min(254 - (int)(magnitude >> 7), 253);  // of the factor that brings the largest to 1 up to 2
    const float factor = __uint_as_float(max(exponent, 1) << 23);
    unit[r] = __uint_as_float((254 - max(exponent, 1)) << 23) * params.scale_log2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      q[i][r] = scaled_pair<fp16_t>(words[r][2 * i], factor);
      q[i][2 + r] = scaled_pair<fp16_t>(words[r][2 * i + 1], factor);
    }
    rope[r] = scaled_pair<bf16_t>(words[r][16], factor);
    rope[2 + r] = scaled_pair<bf16_t>(words[r][17], factor);
  }
  smem.q_rope[4 * group + warp][lane_again()] = make_uint4(rope[0], rope[1], rope[2], rope[3]);
  smem.q_unit[4 * group + warp][lane_again()] = make_float4(unit[0], unit[1], 0.0f, 0.0f);
}

// Offsets of what this lane loads: in a stage, and in the table of scales.
template <class Format>
struct Places {
  int codes, rope, values;  // of S, of P V
  int scale, scale_entry;   // of token `lane`: in a stage, and in the table
  __device__ __forceinline__ explicit Places(int warp) {
    const int lane = tile::lane_id(), g = lane / 4, c = lane % 4, column = bit_reverse(lane % 8);
    codes = ptx::opaque(Format::kRowBytes * bit_reverse(g) + 128 * warp + 16 * c);
    rope = ptx::opaque(Format::kRowBytes * bit_reverse(g) + Format::kRopeOffset + 32 * warp + 8 * c);
    values = ptx::opaque(Format::kRowBytes * bit_reverse(2 * c) + 128 * warp + 16 * (g >> 1 | (g & 1) << 2));
    scale = ptx::opaque(Format::kRowBytes * lane + Format::kNope + 4 * warp);
    scale_entry = ptx::opaque(16 * (lane / 8) + 4 * (column / 2) + column % 2);
  }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The scale of token `lane`, and its log2, to where each lane finds those of its columns. Returns whether any is negative.
__device__ __forceinline__ bool lay_out_scales(float scale, int entry, float (&scales)[4][4][4]) {
  float* place = &scales[0][0][0] + entry;
  place[0] = scale;
  place[2] = ptx::lg2_approx_ftz(fabsf(scale));
  return __any_sync(kFullWarp, scale < 0.0f);
}

// Q times the e4m3 dims of this warp: s[i][e] of column 2 c + e % 2 of tile i, row g + 8 (e / 2).
template <class Format>
__device__ __forceinline__ void multiply_codes(const uint8_t* tokens, const Places<Format>& places, const Query& q,
                                               float (&s)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[i][e] = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint4 codes[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      codes[i] = *reinterpret_cast<const uint4*>(tokens + places.codes + 8 * Format::kRowBytes * i + 64 * h);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t w = word(codes[i], step);
        ptx::mma_m16n8k16_f16(s[i], q[4 * h + step], ptx::cvt_rn_f16x2_e4m3x2_low(w), ptx::cvt_rn_f16x2_e4m3x2_high(w));
      }
  }
}

// This warp's part of the scores: with the scales, and its RoPE dims.
template <class Format>
__device__ __forceinline__ void scale_and_add_rope(const uint8_t* tokens, const Places<Format>& places, const uint4& q_rope,
                                                   const float (&scales)[4][4][4], float (&s)[4][4]) {
  const uint32_t q[4] = {q_rope.x, q_rope.y, q_rope.z, q_rope.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint2 k = *reinterpret_cast<const uint2*>(tokens + places.rope + 8 * Format::kRowBytes * i);
    const float2 scale = *reinterpret_cast<const float2*>(&scales[i][tile::lane_id() % 4][0]);
    float rope[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ptx::mma_m16n8k16_bf16(rope, q, k.x, k.y);
#pragma unroll
    for (int e = 0; e < 4; e++) s[i][e] = s[i][e] * (e % 2 == 0 ? scale.x : scale.y) + rope[e];
  }
}

// Tokens that do not exist do not take part. own: scores of tile `warp`.
__device__ __forceinline__ void mask_invalid(uint32_t valid, int warp, float (&own)[4]) {
  const int token = 8 * warp + bit_reverse(lane_again() % 4 * 2);  // and the one 4 further
#pragma unroll
  for (int e = 0; e < 4; e++)
    if ((valid >> (token + e % 2 * 4) & 1) == 0) own[e] = -infinity();
}

// Paged, causal: tokens past what each row sees. unit: counted from the beginning of the fragment.
template <class Config>
__device__ __forceinline__ void mask_unseen(const SparseDecodeParams& params, const PartPlan& plan, int req, int unit,
                                            int warp, float (&own)[4]) {
  const int seqlen = load_seqlen(params, req), row = lane_again() / 4;
  const int first = load_fragment<Config>(params, plan, req).begin_block * attention::kKvBlock + Config::kUnit * unit;
  const int token = first + 8 * warp + bit_reverse(lane_again() % 4 * 2);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int limit = visible_tokens(params, seqlen, query_row<Config>(params, row + 8 * r).token);
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (token + 4 * e >= limit) own[2 * r + e] = -infinity();
  }
}

// Adds up the parts of the group's four warps: warp w tile w, which finish() may change before all warps get all tiles.
// Both barriers also keep a unit's writes behind the reads of the unit before.
template <class Exchange, class Finish>
__device__ __forceinline__ void exchange_scores(Exchange& exchange, int group, int warp, float (&s)[4][4], float (&own)[4],
                                                Finish finish) {
  const int lane = tile::lane_id();
#pragma unroll
  for (int i = 0; i < 4; i++) exchange.partial[warp][i][lane] = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
  ptx::bar_sync(kGroupBarrier + group, 128);
  float4 part[4];
#pragma unroll
  for (int i = 0; i < 4; i++) part[i] = exchange.partial[i][warp][lane];
  own[0] = (part[0].x + part[1].x) + (part[2].x + part[3].x);
  own[1] = (part[0].y + part[1].y) + (part[2].y + part[3].y);
  own[2] = (part[0].z + part[1].z) + (part[2].z + part[3].z);
  own[3] = (part[0].w + part[1].w) + (part[2].w + part[3].w);
  finish(own);
  exchange.total[warp][lane] = make_float4(own[0], own[1], own[2], own[3]);
  ptx::bar_sync(kGroupBarrier + group, 128);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 v = exchange.total[i][lane];
    s[i][0] = v.x;
    s[i][1] = v.y;
    s[i][2] = v.z;
    s[i][3] = v.w;
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
// Of rows g and g + 8.
struct Accumulator {
  float o[16][4];  // dims 16 c + d (even e) and 64 + 16 c + d (odd e) of the warp's, relative to ref
  float ref[2];    // log2
  float sum[2];    // this thread's share of the sum over this warp's tokens, relative to sum_ref
  float sum_ref[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int d = 0; d < 16; d++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[d][e] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      ref[r] = sum_ref[r] = attention::kNothing;
      sum[r] = 0.0f;
    }
  }
};

// Moves the references of rows that a weight or a summand (given by their maxima, log2) has outgrown.
__device__ __forceinline__ void raise_references(Accumulator& a, float (&weight)[2], float (&summand)[2]) {
  tile::quad_max(weight[0], weight[1]);
  tile::quad_max(summand[0], summand[1]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (weight[r] > a.ref[r] + kWeightLimit) {
      const float moved = weight[r] - (kWeightLimit - kWeightRoom), factor = ptx::ex2_approx_ftz(a.ref[r] - moved);
      a.ref[r] = moved;
#pragma unroll
      for (int d = 0; d < 16; d++) {
        a.o[d][2 * r] *= factor;
        a.o[d][2 * r + 1] *= factor;
      }
    }
    if (summand[r] > a.sum_ref[r] + kSumLimit) {
      a.sum[r] *= ptx::ex2_approx_ftz(a.sum_ref[r] - summand[r]);
      a.sum_ref[r] = summand[r];
    }
  }
}

// From scores to weights, as A fragments of two steps of 16 tokens; adds this warp's tile of tokens to the sums.
__device__ __forceinline__ void weigh(const float (&s)[4][4], const float (&own)[4], const float (&scales)[4][4][4],
                                      bool any_negative, Accumulator& a, uint32_t (&p)[2][4]) {
  const int c = tile::lane_id() % 4;
  float x[4][4], weight[2], summand[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 scale_log2 = *reinterpret_cast<const float2*>(&scales[i][c][2]);
#pragma unroll
    for (int e = 0; e < 4; e++) x[i][e] = s[i][e] + (e % 2 == 0 ? scale_log2.x : scale_log2.y);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    weight[r] = fmaxf(x[0][2 * r], x[0][2 * r + 1]);
#pragma unroll
    for (int i = 1; i < 4; i++) weight[r] = fmaxf(weight[r], fmaxf(x[i][2 * r], x[i][2 * r + 1]));
    summand[r] = fmaxf(own[2 * r], own[2 * r + 1]);
  }
  const bool outgrown = weight[0] > a.ref[0] + kWeightLimit | weight[1] > a.ref[1] + kWeightLimit |
                        summand[0] > a.sum_ref[0] + kSumLimit | summand[1] > a.sum_ref[1] + kSumLimit;
  if (__any_sync(kFullWarp, outgrown)) raise_references(a, weight, summand);
#pragma unroll
  for (int e = 0; e < 4; e++) a.sum[e / 2] += ptx::ex2_approx_ftz(own[e] - a.sum_ref[e / 2]);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      p[i / 2][i % 2 * 2 + r] = ptx::cvt_rn_f16x2(ptx::ex2_approx_ftz(x[i][2 * r] - a.ref[r]),
                                                  ptx::ex2_approx_ftz(x[i][2 * r + 1] - a.ref[r]));
  if (!any_negative) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t signs = __float_as_uint(scales[i][c][0]) >> 31 << 15 | __float_as_uint(scales[i][c][1]) >> 31 << 31;
    p[i / 2][i % 2 * 2] ^= signs;
    p[i / 2][i % 2 * 2 + 1] ^= signs;
  }
}

// O += P V over this warp's dims.
template <class Format>
__device__ __forceinline__ void add_values(const uint8_t* tokens, const Places<Format>& places, const uint32_t (&p)[2][4],
                                           float (&o)[16][4]) {
#pragma unroll
  for (int step = 0; step < 2; step++) {
    uint4 codes[4];  // 16 dims of the tokens that are rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of B
#pragma unroll
    for (int i = 0; i < 4; i++)
      codes[i] = *reinterpret_cast<const uint4*>(tokens + places.values + Format::kRowBytes * (16 * step + 4 * i));
#pragma unroll
    for (int d = 0; d < 16; d += 2) {
      const uint32_t selector = d % 4 == 0 ? 0x5140 : 0x7362;
      const uint32_t b0 = ptx::prmt(word(codes[0], d / 4), word(codes[1], d / 4), selector);
      const uint32_t b1 = ptx::prmt(word(codes[2], d / 4), word(codes[3], d / 4), selector);
      ptx::mma_m16n8k16_f16(o[d], p[step], ptx::cvt_rn_f16x2_e4m3x2_low(b0), ptx::cvt_rn_f16x2_e4m3x2_low(b1));
      ptx::mma_m16n8k16_f16(o[d + 1], p[step], ptx::cvt_rn_f16x2_e4m3x2_high(b0), ptx::cvt_rn_f16x2_e4m3x2_high(b1));
    }
  }
}

// ---- end of a request -------------------------------------------------------------------------------------------
// Barrier among all groups.
template <class Storage>
__device__ __forceinline__ void sync_groups(Storage& smem, uint32_t& parity) {
  const uint32_t merge = smem_addr(&smem.merge);
  arrive_once_per_warp(merge);
  tile::wait(merge, parity);
  parity ^= 1;
}

// log2-sum-exp of two rows over the sums of all warps, a quarter of them by each lane of a quad.
template <int kWarps>
__device__ __forceinline__ void total_lse_log2(const float2 (&sums)[kWarps][16], float (&lse_log2)[2]) {
  const int g = lane_again() / 4, c = lane_again() % 4;
  float most[2] = {attention::kNothing, attention::kNothing}, total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kWarps; i += 4)
#pragma unroll
    for (int r = 0; r < 2; r++) most[r] = fmaxf(most[r], sums[i + c][g + 8 * r].x);
  tile::quad_max(most[0], most[1]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int i = 0; i < kWarps; i += 4) {
      const float2 part = sums[i + c][g + 8 * r];
      total[r] += part.y * ptx::ex2_approx_ftz(part.x - most[r]);
    }
    lse_log2[r] = most[r] + ptx::lg2_approx_ftz(tile::quad_sum(total[r]));
  }
}

// The factor by which an attention sink lowers a row, where the request is whole; a split one meets its sink in combine.
__device__ __forceinline__ float sink_factor(const SparseDecodeParams& params, const QueryRow& row, int slot, float lse_log2) {
  if (params.attn_sink == nullptr || slot >= 0 || !row.exists || lse_log2 == -infinity()) return 1.0f;
  return 1.0f / (1.0f + ptx::ex2_approx_ftz(__ldg(params.attn_sink + row.head) * kLog2E - lse_log2));
}

__device__ __forceinline__ void store_lse(const SparseDecodeParams& params, int slot, int req, const QueryRow& row,
                                          float lse_log2) {
  if (!row.exists) return;
  if (slot >= 0)
    params.lse_partial[((int64_t)slot * params.s_q + row.token) * params.h_q + row.head] = lse_log2;
  else
    params.lse[req * params.lse_stride_batch + row.head * params.lse_stride_head + row.token * params.lse_stride_token] =
        lse_log2 * kLn2;
}

// Row r of the two, 16 adjacent dims each of the two halves of the warp's 128.
template <class Config>
__device__ __forceinline__ void store_output_row(const SparseDecodeParams& params, int slot, int req, int warp, int r,
                                                 const QueryRow& row, const float (&o)[16][4]) {
  if (!row.exists) return;
  const int first_dim = 128 * warp + 16 * (lane_again() % 4);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int e = 2 * r + half, dim = first_dim + 64 * half;
    if (slot >= 0) {
      float* dst = params.o_partial + (((int64_t)slot * params.s_q + row.token) * params.h_q + row.head) * Config::kHeadDimV;
#pragma unroll
      for (int d = 0; d < 16; d += 4)
        *reinterpret_cast<float4*>(dst + dim + d) = make_float4(o[d][e], o[d + 1][e], o[d + 2][e], o[d + 3][e]);
    } else {
      bf16_t* dst = reinterpret_cast<bf16_t*>(params.out) + req * params.out_stride_batch +
                    row.token * params.out_stride_token + row.head * params.out_stride_head;
#pragma unroll
      for (int d = 0; d < 16; d += 8)
        *reinterpret_cast<uint4*>(dst + dim + d) =
            make_uint4(tile::pack<bf16_t>(o[d][e], o[d + 1][e]), tile::pack<bf16_t>(o[d + 2][e], o[d + 3][e]),
                       tile::pack<bf16_t>(o[d + 4][e], o[d + 5][e]), tile::pack<bf16_t>(o[d + 6][e], o[d + 7][e]));
    }
  }
}

// Adds up what the groups have of a request, and writes it.
template <class Config>
__device__ __forceinline__ void finish_request(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem, int req, Accumulator& a) {
  uint32_t parity = (req - plan.begin_req) & 1;  // an odd number of barriers a request: 2 kGroups - 1
  const int lane = lane_again(), g = lane / 4, warp = ptx::tid_x() / 32 % 4, group = ptx::tid_x() / 128;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = tile::quad_sum(a.sum[r]);
    if (lane % 4 == 0) smem.sums[4 * group + warp][g + 8 * r] = make_float2(a.sum_ref[r], sum);
  }
  sync_groups(smem, parity);
  const int slot = attention::slot_of(plan, req);
  float lse_log2[2];
  total_lse_log2(smem.sums, lse_log2);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const QueryRow row = query_row<Config>(params, g + 8 * r);
    if (group == 0 && warp == 0 && lane % 4 == 0) store_lse(params, slot, req, row, lse_log2[r]);
    // In two steps, so that neither leaves the range of float32 before the output does.
    const float root = lse_log2[r] == -infinity() ? 0.0f : ptx::ex2_approx_ftz(0.5f * (a.ref[r] - lse_log2[r]));
    const float factor = root * sink_factor(params, row, slot, lse_log2[r]);
#pragma unroll
    for (int d = 0; d < 16; d++)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; e++) a.o[d][e] = attention::normalised(a.o[d][e], root) * factor;
  }
#pragma unroll 1
  for (int from = 1; from < Config::kGroups; from++) {
    float4(&output)[16][32] = smem.output[warp];
    if (group == from)
#pragma unroll
      for (int d = 0; d < 16; d++) output[d][lane] = make_float4(a.o[d][0], a.o[d][1], a.o[d][2], a.o[d][3]);
    sync_groups(smem, parity);
    if (group == 0)
#pragma unroll
      for (int d = 0; d < 16; d++) {
        const float4 v = output[d][lane];
        a.o[d][0] += v.x;
        a.o[d][1] += v.y;
        a.o[d][2] += v.z;
        a.o[d][3] += v.w;
      }
    sync_groups(smem, parity);
  }
  if (group != 0) return;
#pragma unroll
  for (int r = 0; r < 2; r++)
    store_output_row<Config>(params, slot, req, warp, r, query_row<Config>(params, g + 8 * r), a.o);
}

// ---- roles ------------------------------------------------------------------------------------------------------
// The units of a request's fragment that a group takes.
struct GroupUnits {
  int next, end;  // counted from the beginning of the fragment
  int seen;       // before it all rows see all tokens
};

template <class Config, class Ring>
__device__ __forceinline__ void add_units(const SparseDecodeParams& params, const PartPlan& plan,
                                          typename Config::Storage& smem, int req, int group, int warp,
                                          const Places<typename Config::Format>& places, GroupUnits& units, Ring& ring,
                                          Accumulator& a) {
  using Format = typename Config::Format;
  auto& scales = smem.scales[4 * group + warp];
  Query q;
  load_query<Config>(params, req, smem, group, warp, q);
#pragma unroll 1
  do {
    while (ptx::ld_acquire_cta_shared(smem_addr(&smem.lap[ring.stage])) != ring.phase) {
    }
    tile::wait(smem_addr(&smem.full[ring.stage]), ring.phase);
    const uint8_t* tokens = smem.tokens[ring.stage];
    const uint32_t valid = smem.valid[ring.stage];
    if (valid != 0) {
      const float scale = *reinterpret_cast<const float*>(tokens + places.scale);
      float s[4][4], own[4];
      multiply_codes<Format>(tokens, places, q, s);
      const bool any_negative = lay_out_scales(scale, places.scale_entry, scales);
      __syncwarp();
      scale_and_add_rope<Format>(tokens, places, smem.q_rope[4 * group + warp][tile::lane_id()], scales, s);
      exchange_scores(smem.exchange[group], group, warp, s, own, [&](float (&own)[4]) {
        const float2 unit = *reinterpret_cast<const float2*>(&smem.q_unit[4 * group + warp][tile::lane_id()]);
#pragma unroll
        for (int e = 0; e < 4; e++) own[e] *= e / 2 == 0 ? unit.x : unit.y;
        if (valid == kFullWarp && units.next < units.seen) return;
        mask_invalid(valid, warp, own);
        if (Config::kPaged && params.causal) mask_unseen<Config>(params, plan, req, units.next, warp, own);
      });
      uint32_t p[2][4];
      weigh(s, own, scales, any_negative, a, p);
      add_values<Format>(tokens, places, p, a.o);
    }
    arrive_once_per_warp(smem_addr(&smem.empty[ring.stage]));
    ring.advance();
    units.next += Config::kGroups;
  } while (units.next < units.end);
}

template <class Config>
__device__ __forceinline__ void attend(const SparseDecodeParams& params, const PartPlan& plan, typename Config::Storage& smem,
                                       int group, int warp) {
  const Places<typename Config::Format> places(warp);
  UnitRing<Config::kStages, Config::kGroups> ring{group};
  GroupUnits units{group};
#pragma unroll 1
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    const Fragment fragment = load_fragment<Config>(params, plan, req);
    units.end = Config::kProducerWarps * (fragment.end_block - fragment.begin_block);
    units.seen = units.end;
    if constexpr (Config::kPaged)
      if (params.causal)
        units.seen = (visible_tokens(params, load_seqlen(params, req), 0) - fragment.begin_block * attention::kKvBlock) /
                     Config::kUnit;
    Accumulator a;
    a.clear();
    if (units.next < units.end) add_units<Config>(params, plan, smem, req, group, warp, places, units, ring, a);
    units.next -= units.end;
    finish_request<Config>(params, plan, smem, req, a);
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    ptx::mbarrier_init(smem_addr(&smem.full[stage]), 1);
    ptx::mbarrier_init(smem_addr(&smem.empty[stage]), 4);
    smem.lap[stage] = 1;
  }
  ptx::mbarrier_init(smem_addr(&smem.merge), Config::kConsumerWarps);
  ptx::fence_mbarrier_init();
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
    smem.plan.last_token = min(query_row<Config>(params, Config::kRows - 1).token, params.s_q - 1);
  }
  __syncthreads();
  const PartPlan& plan = smem.plan;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < Config::kConsumerWarps) {
    ptx::setmaxnreg_inc<Config::kGroupRegisters>();
    attend<Config>(params, plan, smem, warp / 4, warp % 4);
  } else {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int half = warp - Config::kConsumerWarps;
    if (half < Config::kProducerWarps) load_tokens<Config>(params, plan, smem, half);
  }
}

}  // namespace flashmla::sparse_decode
