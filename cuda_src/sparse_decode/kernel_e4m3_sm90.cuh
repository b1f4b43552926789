// MLA decode over the 656-byte FP8 cache on Hopper. Sparse: every query token attends to the cache slots that its index list
// names. Paged (dense): to the tokens of its request, by a block table. In blocks of 64; out = softmax(scale Q K^T) V, where V
// is the first 512 dims of the dequantized K.
//
// Method: the pipeline of dense_decode, on codes as they lie in the cache: nothing is dequantized into shared memory.
// Scores: e4m3 tensor cores multiply K's codes by Q, which is the sum of two e4m3 numbers, high and low: together they hold
// every bit of a bf16 value, to 2^-17 of its row's largest. Each 128 dims are summed apart, for their scale is the token's.
// RoPE stays bf16. Those tensor cores keep 13 bits of a sum: where scores are large, a warp multiplies its rows again, as fp16.
// Output: transposed, O^T += V^T P^T, for a register operand of wgmma is its left one: V^T becomes fp16 on the way from shared
// memory to registers, and P lies as its columns are needed. V is relative to a power of two for each token (its unit, from its
// largest scale), P has that power in it: the maximum that probabilities are relative to is that of score + log2(unit).
//
// grid    sparse: (ceil(h_q / 64), s_q, num_sm_parts); paged: (ceil(s_q h_q / 64), 1, num_sm_parts)
// block   512 threads, one CTA an SM
// roles   warpgroup 0  scores: S = Q K^T, masking, softmax, P to shared memory, row sums, log-sum-exp, sink
//         warpgroup 1  output half 0: O[:, 0:256] += P V      warpgroup 2  output half 1: O[:, 256:512] += P V
//         Both encode the first Q, for they have nothing else to do yet; the scores those after it.
//         warpgroup 3  finds the tokens of each block, a warp 16 of them; copies their codes, and works out their scales
// order   The halves are told of P (n) when half of Q K^T (n + 1) is done, and keep the tensor cores busy during its softmax.
//
// barrier     arrivals                         armed by     waited on by
// k_full[s]   8 (warps twice) + TMA            3            all others   codes and scales are in stage s
// k_empty[s]  8 (warps)                        both halves  3            P V of the block in stage s has read it
// p_full[i]   4 (warps)                        scores       both halves  p[i], factors[i] may be read
// p_empty[i]  8 (warps)                        both halves  scores       they have been read
#pragma once
#include "attention/half_partial.cuh"
#include "attention/online_softmax.cuh"
#include "attention/split.cuh"
#include "common/check.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/bar.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/cvt_fp8_halves.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/opaque.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/packed.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/prmt.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_register.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "sparse_decode/config_e4m3.cuh"
#include "sparse_decode/keys.cuh"
#include "sparse_decode/rows.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::sparse_decode {

using tile::arrive_once_per_warp;
using tile::smem_addr;

// Named barriers: one a warpgroup, and two by which the output warpgroups tell the copies and the scores of the first Q.
constexpr uint32_t kScoreBarrier = 1, kOutputBarrier = 2;  // + half
constexpr uint32_t kQueryCopied = 4, kQueryEncoded = 5;

// Bytes from the beginning of a struct.
template <class Storage, class Member>
__device__ __forceinline__ uint32_t offset_of(Member Storage::*member) {
  return (uint32_t)reinterpret_cast<uint64_t>(&(static_cast<Storage*>(nullptr)->*member));
}

// Two neighbours of an array of floats in shared memory.
__device__ __forceinline__ float2 load_pair(const float* at) {
  const uint2 v = ptx::ld_shared_v2(smem_addr(at));
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// One of E4m3Storage::out_offset.
__device__ __forceinline__ int64_t load_offset(const int64_t* at) {
  const uint2 v = ptx::ld_shared_v2(smem_addr(at));
  return (int64_t)((uint64_t)v.y << 32 | v.x);
}

// Values of the 64 tokens, in the order in which a score thread needs them: those of its 16 columns are neighbours, four by four,
// and the four lanes of a quad meet different banks.
__device__ __forceinline__ int column_order(int token) {
  const int c = token % 8 / 2;
  return 16 * c + (token / 16 ^ c / 2) * 4 + token / 8 % 2 * 2 + token % 2;
}
// Where a lane finds those of its columns, from an array's beginning.
__device__ __forceinline__ int lane_columns() {
  const int c = ptx::tid_x() & 3;
  return 64 * c + c / 2 * 16;
}
// Those of accumulators 8 i to 8 i + 7: of token 16 i + 2 (lane % 4) and the next, and of those 8 further. scales: the TokenScales,
// from lane_columns on; array: the offset of one in it.
__device__ __forceinline__ float4 load_columns(uint32_t scales, int array, int i) {
  const uint4 v = ptx::ld_shared_v4((scales ^ 16 * i) + array);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ int key_scales(int tile) { return offset_of(&TokenScales::key) + tile * 64 * sizeof(float); }
__device__ __forceinline__ int exponents() { return offset_of(&TokenScales::exponent); }
__device__ __forceinline__ int inverses() { return offset_of(&TokenScales::inverse); }
// The one that belongs to accumulator j of these eight.
__device__ __forceinline__ float of_column(const float4& columns, int j) {
  return j < 4 ? (j % 2 == 0 ? columns.x : columns.y) : (j % 2 == 0 ? columns.z : columns.w);
}

// ---- copies -----------------------------------------------------------------------------------------------------
// A warp's 16 tokens (a group): their scales as scores and output need them. Where all exist and no scale is less than 2^-8 of the
// largest, they have one unit; else each its own, which takes the scores longer. One that does not exist gets a score of -inf.
// Units stay within 2^-40 and 2^60, so that the sum of a row holds for tokens of any unit: then values below 2^-64 are lost, and
// those beyond 2^76 become infinite. Lanes 16 and up have the tokens of those below.
__device__ __forceinline__ void store_scales(TokenScales& to, bool exists, uint4 scales) {
  const uint32_t of_tile[4] = {scales.x, scales.y, scales.z, scales.w};
  uint32_t largest = 0, least = ~0u;  // magnitudes; what is least of those above zero, less 1
#pragma unroll
  for (int t = 0; t < 4; t++) {
    largest = max(largest, of_tile[t] & 0x7fffffff);
    least = min(least, (of_tile[t] & 0x7fffffff) - 1);
  }
  int biased = min(max((int)(largest >> 23), 127 - 40), 127 + 60);
  const int biased_group = __reduce_max_sync(kFullWarp, exists ? biased : 0);
  const bool one_unit = __all_sync(kFullWarp, exists & (int)(least >> 23) >= biased_group - 8);
  if (one_unit) biased = biased_group;
  const float inverse = __int_as_float((254 - biased) << 23), exponent = (float)(biased - 127);
  const int group = tile::warp_in_group(), lane = tile::lane_id(), token = 16 * group + lane;
  if (lane == 0) {
    to.group_exponent[group] = one_unit ? exponent : infinity();
    to.group_inverse[group] = inverse;
  }
  if (lane < 16) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
      to.key[t][column_order(token)] = __uint_as_float(of_tile[t]);
      to.value[t][token] = (uint16_t)ptx::cvt_rn_f16x2(__uint_as_float(of_tile[t]) * inverse, 0.0f);
    }
    to.exponent[column_order(token)] = exists ? exponent : -infinity();
    to.inverse[column_order(token)] = inverse;
  }
}

__device__ const uint4 kNoScales[1] = {};

template <class Format>
__device__ __forceinline__ uint4 load_scales(const TokenAddress& at) {
  return ptx::ld_global_nc_v4(at.row == nullptr ? reinterpret_cast<const uint8_t*>(kNoScales) : at.row + Format::kNope);
}

// Warpgroup 3. What is copied was named a block before. Where a warp's 16 tokens all exist and lie in one page, the copy engine
// takes them; else cp.async, which makes zeros of those that do not exist.
template <class Config>
__device__ __forceinline__ void copy_tokens(const SparseDecodeParams& params, const PartPlan& plan,
                                            typename Config::Storage& smem) {
  using Format = typename Config::Format;
  const int lane = tile::lane_id(), warp = tile::warp_in_group();
  TokenCursor<Config> cursor(params, plan, 16 * warp + lane % 16);
  tile::RingPosition<Config::kStages> ring;
  TokenName name = cursor.load_name();
  TokenAddress at = locate<Config>(params, name);
  bool starting = true;
  uint4 scales;
  if (!Config::kPaged) scales = load_scales<Format>(at);
  while (!cursor.at_end()) {
    const uint32_t valid = __ballot_sync(kFullWarp, at.row != nullptr);
    const bool boxes = Config::kPaged && params.whole_boxes && valid == kFullWarp;
    const uint32_t full = smem_addr(&smem.k_full[ring.stage]);
    const uint32_t first = smem_addr(smem.k[ring.stage]) + 16 * warp * tile::kTileRowBytes;
    tile::wait(smem_addr(&smem.k_empty[ring.stage]), ring.phase ^ 1);
    if (boxes) {
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, 5 * 16 * tile::kTileRowBytes);
        const int page = params.block_table == nullptr ? name.request : name.index;
#pragma unroll 1
        for (int t = 0; t < 5; t++)
          ptx::cp_async_bulk_tensor_5d(first + t * tile::kTileBytes, &params.k_map, full, t < 4 ? 64 * t : Format::kRopeOffset / 2,
                                       name.detail, 0, 0, page);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 4; i++) {
        const uint8_t* row = shuffle<Format>(at, 4 * i + lane / 8).row;
        const uint32_t bytes = row == nullptr ? 0 : 16;  // 0 writes zeros, for 0 x anything must stay 0
        const uint32_t dst = first + tile::swizzle_128b(4 * i + lane / 8, lane % 8);
#pragma unroll
        for (int t = 0; t < 5; t++)
          ptx::cp_async_16(dst + t * tile::kTileBytes, row + 16 * (lane % 8) + (t < 4 ? 128 * t : Format::kRopeOffset), bytes);
      }
      if (lane == 0) ptx::mbarrier_arrive(full);
    }
    if (Config::kPaged) scales = load_scales<Format>(at);
    cursor.next();
    name = cursor.load_name();
    store_scales(smem.scales[ring.stage], valid >> lane & 1, scales);
    if (!boxes) {
      ptx::cp_async_wait_all();
      ptx::fence_proxy_async();  // by these warps, which have the time, for wgmma to read
    }
    arrive_once_per_warp(full);
    if (starting) ptx::bar_sync(kQueryCopied, 384);  // an SM takes in so much: Q before the second block
    starting = false;
    ring.advance();
    at = locate<Config>(params, name);
    if (!Config::kPaged) scales = load_scales<Format>(at);
    if (!Config::kPaged && at.row != nullptr) {  // of a token that may lie anywhere: to the L2, while the stage is still in use
      const uint8_t* half = at.row + lane / 16 * 384;  // two lanes a token
      ptx::prefetch_l2(half);
      ptx::prefetch_l2(half + 128);
      ptx::prefetch_l2(half + (lane < 16 ? 256 : Format::kRowBytes - 384 - 1));
    }
  }
}

// ---- scores -----------------------------------------------------------------------------------------------------
// Four dims of a row of Q as codes: x = high + low, to 2^-10.
struct CodePair {
  uint32_t high, low;
};
__device__ __forceinline__ CodePair split_codes(uint32_t bf16_01, uint32_t bf16_23, uint32_t inverse_unit) {
  uint32_t halves[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t x = ptx::mul_rn_bf16x2(i == 0 ? bf16_01 : bf16_23, inverse_unit);
    halves[i] = ptx::cvt_rn_f16x2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
  }
  const uint32_t high = ptx::cvt_rn_satfinite_e4m3x4_f16x2(halves[0], halves[1]);
  return {high, ptx::cvt_rn_satfinite_e4m3x4_f16x2(ptx::sub_rn_f16x2(halves[0], ptx::cvt_rn_f16x2_e4m3x2_low(high)),
                                                   ptx::sub_rn_f16x2(halves[1], ptx::cvt_rn_f16x2_e4m3x2_high(high)))};
}

// Q of one request, in two steps, by warps of 4 kSteps rows each. Lanes 8 g to 8 g + 7 take one row at a time, each of them 8 of
// every 64 dims; which row is such that loads and stores meet no bank twice. This is a lane's first one.
template <int kSteps>
__device__ __forceinline__ int first_query_row(int warp) {
  const int g = ptx::tid_x() % 32 / 8;
  return 4 * kSteps * warp + g % 2 * 4 + g / 2;
}
__device__ __forceinline__ int query_row_of(int first_row, int step) { return first_row + step / 2 * 8 + step % 2 * 2; }

// First its rows are copied to where their codes will be, when no warp reads the tiles any more. Of every 128 dims, 64 lie in the
// place of the low codes and 64 in that of the high ones.
template <class Config, int kSteps>
__device__ __forceinline__ void request_query(const SparseDecodeParams& params, int req, int first_row,
                                              typename Config::Storage& smem) {
  const int chunk = ptx::tid_x() % 8;
#pragma unroll 1
  for (int step = 0; step < kSteps; step++) {
    const int row = query_row_of(first_row, step);
    const bf16_t* src = query_pointer<Config>(params, req, row) + 8 * chunk;
    const uint32_t dst = smem_addr(smem.q) + tile::swizzle_128b(row, chunk);
    const uint32_t bytes = query_row<Config>(params, row).exists ? 16 : 0;  // multiplying zeros takes the least power
#pragma unroll
    for (int t = 0; t < 9; t++) ptx::cp_async_16(dst + t * tile::kTileBytes, src + 64 * t, bytes);
  }
}

__device__ __forceinline__ uint32_t largest_of(const uint4& v) {
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  return ptx::max_u16x2(ptx::max_u16x2(v.x & kMagnitudes, v.y & kMagnitudes),
                        ptx::max_u16x2(v.z & kMagnitudes, v.w & kMagnitudes));
}

// Then what the warp copied becomes codes, multiples of a power of two for each row, its unit, of which the largest value is 128
// to 256. RoPE is divided by it too. A row that is not finite becomes zeros, and its unit 0: its sum will be NaN if it sees any
// token.
template <class Config, int kSteps>
__device__ __forceinline__ void encode_query(int first_row, typename Config::Storage& smem) {
  __syncwarp();
  const int chunk = ptx::tid_x() % 8;
#pragma unroll 1
  for (int step = 0; step < kSteps; step++) {
    const int row = query_row_of(first_row, step);
    const uint32_t copied = smem_addr(smem.q) + tile::swizzle_128b(row, chunk);
    uint4 v[9];
#pragma unroll
    for (int t = 0; t < 9; t++) v[t] = ptx::ld_shared_v4(copied + t * tile::kTileBytes);
    uint32_t largest = 0, largest_rope = largest_of(v[8]);
#pragma unroll
    for (int t = 0; t < 8; t++) largest = ptx::max_u16x2(largest, largest_of(v[t]));
    largest = ptx::max_u16x2(ptx::prmt(largest, largest_rope, 0x5410), ptx::prmt(largest, largest_rope, 0x7632));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
      largest = ptx::max_u16x2(largest, __shfl_xor_sync(kFullWarp, largest, distance));
    const int biased_nope = largest >> 7 & 0xff, biased_rope = largest >> 23;
    const int biased = max(biased_nope, max(biased_rope - 40, 16));  // so that RoPE stays finite
    const bool finite = biased_nope < 255 && biased_rope < 255;
    if (!finite) {
#pragma unroll
      for (int t = 0; t < 9; t++) v[t] = make_uint4(0, 0, 0, 0);
    }
    if (chunk == 0) smem.q_unit[row] = __int_as_float(finite ? (biased - 7) << 23 : 0);
    const uint32_t inverse_unit = (261 - biased) << 7 | (261 - biased) << 23;
    ptx::st_shared_v4(copied + 8 * tile::kTileBytes,
                      make_uint4(ptx::mul_rn_bf16x2(v[8].x, inverse_unit), ptx::mul_rn_bf16x2(v[8].y, inverse_unit),
                                 ptx::mul_rn_bf16x2(v[8].z, inverse_unit), ptx::mul_rn_bf16x2(v[8].w, inverse_unit)));
    const uint32_t coded = smem_addr(smem.q) + tile::swizzle_128b(row, chunk / 2) + chunk % 2 * 8;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < 8; t++) {
      const CodePair a = split_codes(v[t].x, v[t].y, inverse_unit), b = split_codes(v[t].z, v[t].w, inverse_unit);
      const uint32_t low = (coded ^ t % 2 * 64) + t / 2 * 2 * tile::kTileBytes;
      ptx::st_shared_v2(low, make_uint2(a.low, b.low));
      ptx::st_shared_v2(low + tile::kTileBytes, make_uint2(a.high, b.high));
    }
  }
  ptx::fence_proxy_async();
}

// S = Q K^T for one block, in units of Q's rows. tile_done(t): called when the products of tile t are.
template <class Config, class TileDone>
__device__ __forceinline__ void compute_products(float (&s)[32], uint32_t smem, uint32_t scales,
                                                 const tile::RingPosition<Config::kStages>& ring, TileDone tile_done) {
  using Storage = typename Config::Storage;
  tile::wait(smem + offset_of(&Storage::k_full) + 8 * ring.stage, ring.phase);
  const uint64_t q_desc = tile::k_major_desc(smem + offset_of(&Storage::q));
  const uint64_t k_desc = tile::k_major_desc(smem + offset_of(&Storage::k) + 5 * tile::kTileBytes * ring.stage);
  float sums[2][32];  // over a tile of 128 dims; of the low codes first, while it is small
  const auto start = [&](int t) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      ptx::wgmma_m64n64k32_ss_e4m3(
          sums[t % 2], tile::advance(q_desc, (2 * t + i / 4) * tile::kTileBytes + i % 4 * tile::kKMajorStepBytes),
          tile::advance(k_desc, t * tile::kTileBytes + i % 4 * tile::kKMajorStepBytes), i > 0);
    ptx::wgmma_commit_group();
  };
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; i++)
    ptx::wgmma_m64n64k16_ss<bf16_t>(s, tile::advance(q_desc, 8 * tile::kTileBytes + i * tile::kKMajorStepBytes),
                                    tile::advance(k_desc, 4 * tile::kTileBytes + i * tile::kKMajorStepBytes), i > 0);
  start(0);
  start(1);
  float4 columns[2];
#pragma unroll
  for (int i = 0; i < 2; i++) columns[i] = load_columns(scales, key_scales(0), i);
#pragma unroll
  for (int t = 0; t < 4; t++) {
    if (t < 3)
      ptx::wgmma_wait_group<1>();
    else
      ptx::wgmma_wait_group<0>();
    tile_done(t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int j = 0; j < 8; j++) s[8 * i + j] += sums[t % 2][8 * i + j] * of_column(columns[i % 2], j);
      if (i < 2 || t < 3) columns[i % 2] = load_columns(scales, key_scales(i < 2 ? t : t + 1), (i + 2) % 4);
    }
    if (t < 2) {
      ptx::wgmma_fence();
      start(t + 2);
    }
  }
}

// Two rows of Q as A fragments of four steps of 16 of 64 dims, of which lane c of a quad has dims 16 c to 16 c + 15. low: where its
// low codes are. A high and a low one together are a number of fp16.
__device__ __forceinline__ void load_query_fragments(uint32_t (&a)[4][4], uint32_t low) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const uint4 l = ptx::ld_shared_v4(low + 8 * r * tile::kTileRowBytes);
    const uint4 h = ptx::ld_shared_v4(low + 8 * r * tile::kTileRowBytes + tile::kTileBytes);
    const uint32_t lows[4] = {l.x, l.y, l.z, l.w}, highs[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i][r] = ptx::add_rn_f16x2(ptx::cvt_rn_f16x2_e4m3x2_low(highs[i]), ptx::cvt_rn_f16x2_e4m3x2_low(lows[i]));
      a[i][r + 2] = ptx::add_rn_f16x2(ptx::cvt_rn_f16x2_e4m3x2_high(highs[i]), ptx::cvt_rn_f16x2_e4m3x2_high(lows[i]));
    }
  }
}

// The same S with sums in float32, of a warp's 16 rows, as fp16. A block takes two and a half times as long with it.
template <class Config>
__device__ __forceinline__ void multiply_exactly(float (&s)[32], typename Config::Storage& smem, uint32_t scales, int stage) {
  const int lane = ptx::tid_x() % 32, g = lane / 4, c = lane % 4;
  const uint32_t q = smem_addr(smem.q) + tile::swizzle_128b(tile::fragment_row_again(), c);
  const uint32_t k = smem_addr(smem.k[stage]) + tile::swizzle_128b(g, c);
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; half++) {  // RoPE: 8 of the bf16 of 32 dims a lane, two steps
    const uint4 q0 = ptx::ld_shared_v4((q ^ 64 * half) + 8 * tile::kTileBytes);
    const uint4 q1 = ptx::ld_shared_v4((q ^ 64 * half) + 8 * tile::kTileBytes + 8 * tile::kTileRowBytes);
    const uint32_t a[2][4] = {{q0.x, q1.x, q0.y, q1.y}, {q0.z, q1.z, q0.w, q1.w}};
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const uint4 b = ptx::ld_shared_v4((k ^ 64 * half) + 4 * tile::kTileBytes + n * tile::kSwizzleAtomBytes);
      float(&d)[4] = reinterpret_cast<float(&)[4]>(s[4 * n]);
      ptx::mma_m16n8k16_bf16(d, a[0], b.x, b.y);
      ptx::mma_m16n8k16_bf16(d, a[1], b.z, b.w);
    }
  }
#pragma unroll 1
  for (int i = 0; i < 8; i++) {  // 64 dims
    const int t = i / 2, half = i % 2;
    uint32_t a[4][4];
    load_query_fragments(a, (q ^ 64 * half) + 2 * t * tile::kTileBytes);
    const uint32_t from = (k ^ 64 * half) + t * tile::kTileBytes;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      float sums[8] = {};
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const uint4 v = ptx::ld_shared_v4(from + (n + m) * tile::kSwizzleAtomBytes);
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int step = 0; step < 4; step++)
          ptx::mma_m16n8k16_f16(reinterpret_cast<float(&)[4]>(sums[4 * m]), a[step], ptx::cvt_rn_f16x2_e4m3x2_low(codes[step]),
                                ptx::cvt_rn_f16x2_e4m3x2_high(codes[step]));
      }
      const float4 column = load_columns(scales, key_scales(t), n / 2);
#pragma unroll
      for (int j = 0; j < 8; j++) s[4 * n + j] += sums[j] * of_column(column, j);
    }
  }
}

// 13 bits of a score are not enough once the log-sum-exp of its row (log2) is beyond this, or below its negative. A thread looks at
// its quarter of the row, so beyond means 2 more at the latest.
constexpr float kExactFrom = 40.0f;
// Of a score warp. kRescaled, bit i: its flag in factors[i] is not 0. kExact: it multiplies exactly for the rest of this request.
// kPending: P of the block before is not announced yet.
constexpr uint32_t kRescaled = 3, kExact = 4, kPending = 8;

// log2 of the unit of each group of 16 tokens, +inf if they have not one in common, and 1 / unit.
struct GroupUnits {
  float exponent[4], inverse[4];
};
__device__ __forceinline__ void load_units(GroupUnits& units, uint32_t scales) {
  const uint4 exponents = ptx::ld_shared_v4(scales + offset_of(&TokenScales::group_exponent));
  const uint4 inverses = ptx::ld_shared_v4(scales + offset_of(&TokenScales::group_inverse));
  units = {{__uint_as_float(exponents.x), __uint_as_float(exponents.y), __uint_as_float(exponents.z), __uint_as_float(exponents.w)},
           {__uint_as_float(inverses.x), __uint_as_float(inverses.y), __uint_as_float(inverses.z), __uint_as_float(inverses.w)}};
}

// P = 2^(s - maximum) in fp16, and the row sums, s being log2 of the probability times the token's unit. A probability is as precise
// in fp16 wherever it lies between 2^-14 and the largest finite one, so it may outgrow its row's maximum by far: P is made
// relative to the maxima so far, and again only where one of the warp's rows has outgrown its own by 2^8.
// This is what a block takes as a rule: s are scores, to be multiplied by scale0 and scale1, and the tokens of a group have one
// unit. exact_above: the sums beyond which scores must be exact. Returns whether that will do, the same for all lanes; if not,
// nothing has changed but P. It will not where a group's tokens have units of their own, for infinity - anything is no number
// below 256.
__device__ __forceinline__ bool make_usual_probabilities(uint32_t (&p)[4][4], const float (&s)[32], float scale0, float scale1,
                                                         const GroupUnits& units, attention::RowState& row0,
                                                         attention::RowState& row1, const float (&exact_above)[2]) {
  float sum0 = row0.sum, sum1 = row1.sum, all;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float offset0 = units.exponent[i] - row0.max_log2, offset1 = units.exponent[i] - row1.max_log2;
    float of_group[2];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const bool first = j % 4 < 2;
      const float scale = first ? scale0 : scale1, offset = first ? offset0 : offset1;
      const float x = ptx::ex2_approx_ftz(s[8 * i + j] * scale + offset), y = ptx::ex2_approx_ftz(s[8 * i + j + 1] * scale + offset);
      float& sum = of_group[first ? 0 : 1];
      sum = j < 4 ? x + y : sum + (x + y);
      p[i][j / 2] = tile::pack<fp16_t>(x, y);
    }
    sum0 += of_group[0] * units.inverse[i];
    sum1 += of_group[1] * units.inverse[i];
    all = i == 0 ? of_group[0] + of_group[1] : all + (of_group[0] + of_group[1]);
  }
  // None is larger than all together.
  if (__any_sync(kFullWarp, !(all <= 256.0f) | (sum0 > exact_above[0]) | (sum1 > exact_above[1]))) return false;
  row0.sum = sum0;
  row1.sum = sum1;
  return true;
}

// The same for a block that is not usual: tokens have units of their own, are missing or masked, maxima are raised, sums must be
// exact. s: sums of products. raise: the maxima are raised first. Returns whether they were; rescale0, rescale1: factors for what
// was accumulated before. flags: get kExact once this warp needs exact sums for the present request. exactly(): takes the sums of
// products anew. finish(): makes of them log2 of what P is. mask(), if `masks`: takes tokens away.
template <class Exactly, class Finish, class Mask>
__device__ __forceinline__ bool make_probabilities(uint32_t (&p)[4][4], float (&s)[32], uint32_t scales,
                                                   attention::RowState& row0, attention::RowState& row1, bool raise, bool masks,
                                                   float& rescale0, float& rescale1, uint32_t& flags, Exactly exactly,
                                                   Finish finish, Mask mask) {
  constexpr uint32_t kBeyondLargest = 0x23ff23ff;  // added to a probability above 2^8, sets its sign
  float sum0, sum1;
  bool finished = false;
  for (;;) {
    if (!finished) {
      if ((flags & kExact) != 0) exactly();
      finish();
      if (masks) mask();
      finished = true;
    }
    if (raise) {
      float max0, max1;
      attention::row_max(s, max0, max1);
      rescale0 *= row0.raise(max0);
      rescale1 *= row1.raise(max1);
    }
    sum0 = row0.sum;
    sum1 = row1.sum;
    uint32_t largest = 0;
    const uint32_t scales_again = ptx::opaque(scales);  // or four addresses are kept
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 column = load_columns(scales_again, inverses(), i);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const bool first = j % 4 < 2;
        const float max_log2 = first ? row0.max_log2 : row1.max_log2;
        const float x = ptx::ex2_approx_ftz(s[8 * i + j] - max_log2), y = ptx::ex2_approx_ftz(s[8 * i + j + 1] - max_log2);
        float& sum = first ? sum0 : sum1;
        sum += x * of_column(column, j);
        sum += y * of_column(column, j + 1);
        p[i][j / 2] = tile::pack<fp16_t>(x, y);
        largest = ptx::max_u16x2(largest, p[i][j / 2]);
      }
    }
    const float exact_from = (flags & kExact) != 0 ? infinity() : kExactFrom;
    bool inexact = (sum0 > ptx::ex2_approx_ftz(exact_from - row0.max_log2)) |
                   (sum1 > ptx::ex2_approx_ftz(exact_from - row1.max_log2));
    if (!__any_sync(kFullWarp, raise | inexact | ((largest + kBeyondLargest & 0x80008000) != 0))) break;
    if (!raise) {
      raise = true;
      continue;
    }
    const float all0 = tile::quad_sum(sum0), all1 = tile::quad_sum(sum1);
    inexact |= (all0 > 0.0f & all0 < ptx::ex2_approx_ftz(-exact_from - row0.max_log2)) |
               (all1 > 0.0f & all1 < ptx::ex2_approx_ftz(-exact_from - row1.max_log2));
    if (!__any_sync(kFullWarp, inexact)) break;
    flags |= kExact;
    finished = false;
  }
  row0.sum = sum0;
  row1.sum = sum1;
  return raise;
}

// The sum of a whole row, from those of its four threads.
__device__ __forceinline__ void finish_sum(attention::RowState& row, float q_unit) {
  row.sum = tile::quad_sum(row.sum);
  if (q_unit == 0.0f && row.max_log2 > attention::kNothing) row.sum = __int_as_float(0x7fffffff);
}

// The first request from `req` on of which this CTA has blocks.
template <class Config>
__device__ __forceinline__ int next_request(const SparseDecodeParams& params, const PartPlan& plan, int req) {
  for (; req <= plan.end_req; req++) {
    const Fragment fragment = load_fragment<Config>(params, plan, req);
    if (fragment.begin_block < fragment.end_block) break;
  }
  return req;
}

// Registers are scarce here: what the loop over blocks does not need every time is derived again.
template <class Config>
__device__ __forceinline__ void compute_scores(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t count = 0;  // of the blocks before: its lowest bit is the index of p, the next the parity of p's barriers
  uint32_t flags = kRescaled;
  using Storage = typename Config::Storage;
  const uint32_t smem_base = ptx::opaque(smem_addr(&smem));  // or it is worked out anew in every block
  const uint32_t p_place = ptx::opaque(
      smem_addr(smem.p) + tile::swizzle_128b(ptx::tid_x() % 128 / 32 * 16 + ptx::tid_x() % 16, ptx::tid_x() % 32 / 16));
  int next = plan.begin_req;  // whose Q is loaded next; the first by output warps
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
    flags &= kRescaled;
    // From this block on, rows may not see all of its tokens. Those past the end of the request do not even exist.
    int whole_blocks = end_block;
    if (Config::kPaged && params.causal)
      whole_blocks = visible_tokens(params, load_seqlen(params, req), query_row<Config>(params, 0).token) / Config::kBlock;
    float exact_above[2];
    if (block < end_block) {
      if (count == 0) {
        ptx::bar_sync(kQueryEncoded, 384);
      } else {
        ptx::cp_async_wait_all();
        encode_query<Config, 4>(first_query_row<4>(ptx::tid_x() / 32), smem);
        ptx::bar_sync(kScoreBarrier, 128);
      }
      next = next_request<Config>(params, plan, req + 1);
    }
    for (; block < end_block; block++) {
      float s[32];
      const bool last = block + 1 == end_block;
      const uint32_t stage_scales = smem_base + offset_of(&Storage::scales) + (int)sizeof(TokenScales) * ring.stage;
      const uint32_t scales = stage_scales + lane_columns();
      float scale0, scale1;
      GroupUnits units;
      compute_products<Config>(s, smem_base, scales, ring, [&](int tile) {
        if (tile == 1 && (flags & kPending) != 0) arrive_once_per_warp(smem_addr(&smem.p_full[count - 1 & 1]));
        if (tile == 3) {
          scale0 = params.scale_log2 * smem.q_unit[tile::fragment_row_again()];
          scale1 = params.scale_log2 * smem.q_unit[tile::fragment_row_again() + 8];
          load_units(units, stage_scales);
        }
      });
      const bool masks = Config::kPaged && block >= whole_blocks, raise = (flags & kPending) == 0;  // in a request's first block
      uint32_t p[4][4];
      float rescale0 = 1.0f, rescale1 = 1.0f;
      bool rescales = false;
      if (raise | masks | (flags & kExact) != 0 ||
          !make_usual_probabilities(p, s, scale0, scale1, units, state0, state1, exact_above)) {
        const auto exactly = [&] { multiply_exactly<Config>(s, smem, scales, ring.stage); };
        const auto finish = [&] {  // log2 of what P is: of the probability times the token's unit
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float4 columns = load_columns(scales, exponents(), i);
#pragma unroll
            for (int j = 0; j < 8; j++) s[8 * i + j] = s[8 * i + j] * (j % 4 < 2 ? scale0 : scale1) + of_column(columns, j);
          }
        };
        const auto mask = [&] {
          if constexpr (Config::kPaged) mask_unseen<Config>(params, req, ptx::opaque(block), s);
        };
        rescales = make_probabilities(p, s, ptx::opaque(scales), state0, state1, raise, masks, rescale0, rescale1, flags, exactly,
                                      finish, mask);
        exact_above[0] = ptx::ex2_approx_ftz(kExactFrom - state0.max_log2);
        exact_above[1] = ptx::ex2_approx_ftz(kExactFrom - state1.max_log2);
      }
      ring.advance();

      tile::wait(smem_base + offset_of(&Storage::p_empty) + 8 * (count & 1), ~count >> 1 & 1);
#pragma unroll
      for (int k = 0; k < 4; k++)  // 16 of the 64 tokens
        ptx::stmatrix_x4((p_place ^ 32 * k) + (count & 1) * tile::kTileBytes, p[k][0], p[k][1], p[k][2], p[k][3]);
      const uint32_t flag = 1u << (count & 1);
      if (rescales || last || (flags & kRescaled) != 0) {  // hardly ever
        Factors& factors = smem.factors[count & 1];
        const int row = tile::fragment_row_again();
        if (last) {
          finish_sum(state0, smem.q_unit[row]);
          finish_sum(state1, smem.q_unit[row + 8]);
        }
        if ((threadIdx.x & 3) == 0) {
          factors.rescale[row] = rescale0;
          factors.rescale[row + 8] = rescale1;
          if (last) {
            const int slot = attention::slot_of(plan, req);
            factors.inv_sum[row] = output_factor(params, state0, query_row<Config>(params, row), slot);
            factors.inv_sum[row + 8] = output_factor(params, state1, query_row<Config>(params, row + 8), slot);
          }
        }
        if (tile::lane_id() == 0) factors.rescales[tile::warp_in_group()] = rescales;
        flags = rescales ? flags | flag : flags & ~flag;
        if (last) {
          arrive_once_per_warp(smem_addr(&smem.p_full[count & 1]));
          if (next <= plan.end_req) {
            ptx::bar_sync(kScoreBarrier, 128);  // no warp reads Q any more
            request_query<Config, 4>(params, next, first_query_row<4>(ptx::tid_x() / 32), smem);
          }
        }
      }
      count++;
      flags |= kPending;
    }
    const int slot = attention::slot_of(plan, req), row_again = tile::fragment_row_again();
    store_lse(params, slot, req, query_row<Config>(params, row_again), state0);
    store_lse(params, slot, req, query_row<Config>(params, row_again + 8), state1);
  }
}

// ---- output -----------------------------------------------------------------------------------------------------
// An output warp accumulates 64 of its half's 256 dims, for all 64 rows, as four m64n64 tiles. Lane 4 r + c has four adjacent
// dims of each 32, two a tile: o[k / 2][4 i + 2 (k % 2) + e] is dim 32 (k / 4) + 4 r + k % 4 of row 8 i + 2 c + e.
using Output = float[4][32];

// Which half of the output a warp works on; derived again at each use, for the accumulators leave few registers.
__device__ __forceinline__ int output_half() { return ptx::tid_x() / 128 - 1; }

// What a lane needs of 16 tokens for two tiles: the codes of four dims of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
struct Codes {
  uint32_t token[4];
};
// even: the lane's codes of token 2 c of the first 16; half: of a step, the first two tiles or the others.
__device__ __forceinline__ Codes load_codes(uint32_t even, int step, int half) {
  Codes codes;
#pragma unroll
  for (int i = 0; i < 4; i++)  // 32 dims further, and at an odd token, the swizzled place differs in one bit
    codes.token[i] = ptx::ld_shared((i % 2 == 0 ? even ^ 32 * half : (even ^ 32 * half ^ 16) + tile::kTileRowBytes) +
                                    (2 * step + i / 2) * tile::kSwizzleAtomBytes);
  return codes;
}
// V as A fragment of a tile: the first two of the four dims, or the others. scale: of tokens 2 c, 2 c + 1, and of the other two.
__device__ __forceinline__ void make_values(uint32_t (&a)[4], const Codes& codes, const uint32_t (&scale)[2], int pair_of_dims) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t by_dim = ptx::prmt(codes.token[2 * i], codes.token[2 * i + 1], pair_of_dims == 0 ? 0x5140 : 0x7362);
    a[2 * i] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e4m3x2_low(by_dim), scale[i]);
    a[2 * i + 1] = ptx::mul_rn_f16x2(ptx::cvt_rn_f16x2_e4m3x2_high(by_dim), scale[i]);
  }
}

// O^T += V^T P^T for one block: 16 tokens after 16, tile by tile; values are made while the product before runs.
template <class Config>
__device__ __forceinline__ void accumulate(Output& o, typename Config::Storage& smem, int stage, uint32_t count) {
  const int lane = ptx::tid_x() % 32, warp = ptx::tid_x() / 32 % 4, tile_index = 2 * output_half() + warp / 2;
  const uint32_t even = smem_addr(smem.k[stage][tile_index]) +
                        tile::swizzle_128b(lane % 4 * 2, warp % 2 * 4 + lane / 16) + lane / 4 % 4 * 4;
  const uint32_t scales = smem_addr(&smem.scales[stage].value[tile_index][lane % 4 * 2]);
  const uint64_t p_desc = tile::k_major_desc(smem_addr(smem.p[count & 1]));
  uint32_t a[2][4];
  Codes codes = load_codes(even, 0, 0);
  uint32_t scale[2] = {ptx::ld_shared(scales), ptx::ld_shared(scales + 16)};
  make_values(a[0], codes, scale, 0);
  tile::wait(smem_addr(&smem.p_full[count & 1]), count >> 1 & 1);
  const Factors& factors = smem.factors[count & 1];
  const uint32_t rescales = ptx::ld_shared(smem_addr(factors.rescales));
  ptx::fence_proxy_async();  // P; by these warps, which have the time
  if (rescales != 0) {  // hardly ever
#pragma unroll
    for (int first = 0; first < 8; first += 2) {  // 16 rows
      if ((rescales >> 4 * first & 0xff) == 0) continue;
#pragma unroll
      for (int i = first; i < first + 2; i++) {
        const float2 rescale = load_pair(&factors.rescale[8 * i + lane % 4 * 2]);
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) o[m][4 * i + j] *= j % 2 == 0 ? rescale.x : rescale.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int step = i / 4, m = i % 4;
    if (i > 0) make_values(a[i % 2], codes, scale, m % 2);
    if (m % 2 == 1 && i < 15) codes = load_codes(even, (i + 1) / 4, (i + 1) % 4 / 2);
    if (i == 14) arrive_once_per_warp(smem_addr(&smem.k_empty[stage]));  // all of it is in registers
    if (m == 3 && i < 15)
#pragma unroll
      for (int pair = 0; pair < 2; pair++) scale[pair] = ptx::ld_shared(scales + 32 * (step + 1) + 16 * pair);
    if (i > 0) ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence();
    ptx::wgmma_m64n64k16_rs<fp16_t>(o[m], a[i % 2], tile::advance(p_desc, step * tile::kKMajorStepBytes), 1);
    ptx::wgmma_commit_group();
  }
}

// All rows, multiplied by their factors; a row with factor 0 becomes 0, whatever the accumulators hold. An 8 x 8 block of (dim,
// row) is transposed between the lanes: then lane 4 r + c has dims 8 c + k % 4 and 8 c + 4 + k % 4 of each 32 of row r.
// row_pointer(row): this warp's dims of it, or null to skip it.
template <class Element, class RowPointer>
__device__ __forceinline__ void store_rows(const Output& o, const float* multiplier, RowPointer row_pointer) {
  const int lane = ptx::tid_x() % 32;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 factor = load_pair(multiplier + 8 * i + lane % 4 * 2);
    const uint32_t counts = (factor.x == 0.0f ? 0 : 0xffff) | (factor.y == 0.0f ? 0 : 0xffff0000);
    uint32_t v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const float x = o[k / 2][4 * i + k % 2 * 2], y = o[k / 2][4 * i + k % 2 * 2 + 1];
      v[k] = ptx::movmatrix_trans(tile::pack<Element>(x * factor.x, y * factor.y) & counts);
    }
    Element* row = row_pointer(8 * i + lane / 4);
    if (row == nullptr) continue;
#pragma unroll
    for (int g = 0; g < 2; g++)
      reinterpret_cast<uint4*>(row + 32 * g)[lane % 4] =
          make_uint4(ptx::prmt(v[4 * g], v[4 * g + 1], 0x5410), ptx::prmt(v[4 * g + 2], v[4 * g + 3], 0x5410),
                     ptx::prmt(v[4 * g], v[4 * g + 1], 0x7632), ptx::prmt(v[4 * g + 2], v[4 * g + 3], 0x7632));
  }
}

// Per row the largest magnitude over this warp's dims, to shared memory.
__device__ __forceinline__ void store_largest(const Output& o, float* largest) {
  const int lane = ptx::tid_x() % 32;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float of_row[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int k = 0; k < 8; k++) of_row[e] = fmaxf(of_row[e], fabsf(o[k / 2][4 * i + k % 2 * 2 + e]));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        of_row[e] = fmaxf(of_row[e], __shfl_xor_sync(kFullWarp, of_row[e], distance));
    }
    if (lane < 4) {
      largest[8 * i + 2 * lane] = of_row[0];
      largest[8 * i + 2 * lane + 1] = of_row[1];
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_output(const SparseDecodeParams& params, typename Config::Storage& smem, int half, int slot,
                                             int req, const Output& o, const float* inv_sum) {
  const int thread = ptx::tid_x() % 128, first_dim = 256 * half + thread / 32 * 64;
  if (slot < 0) {
    bf16_t* out = reinterpret_cast<bf16_t*>(params.out) + req * params.out_stride_batch + first_dim;
    store_rows<bf16_t>(o, inv_sum, [&](int row) {
      const int64_t offset = load_offset(&smem.out_offset[row]);
      return offset == kNoRow ? nullptr : out + offset;
    });
    return;
  }
  const auto index_of = [&](const QueryRow& row) { return ((int64_t)slot * params.s_q + row.token) * params.h_q + row.head; };
  store_largest(o, smem.largest[half][thread / 32]);
  ptx::bar_sync(kOutputBarrier + half, 128);
  if (thread < 64) {
    float largest = 0.0f;
#pragma unroll
    for (int warp = 0; warp < 4; warp++) largest = fmaxf(largest, smem.largest[half][warp][thread]);
    // What a row that attended to nothing holds does not count. A sum relative to large units is small, and its inverse large:
    // their product stays below 2^121.
    const float inverse = inv_sum[thread];
    const float most = __int_as_float(min(127 + 120 + 127 - (int)(__float_as_uint(inverse) >> 23), 254) << 23);
    const float factor = fminf(attention::half_partial_factor(largest * inverse), most);
    smem.multiplier[half][thread] = inverse * factor;
    const QueryRow row = query_row<Config>(params, thread);
    float* factors = attention::half_partial_factors(params.lse_partial, (int64_t)2 * params.num_sm_parts * params.s_q * params.h_q);
    if (row.exists) factors[2 * index_of(row) + half] = attention::inverse_power_of_two(factor);
  }
  ptx::bar_sync(kOutputBarrier + half, 128);
  store_rows<fp16_t>(o, smem.multiplier[half], [&](int local_row) -> fp16_t* {
    const QueryRow row = query_row<Config>(params, local_row);
    if (!row.exists) return nullptr;
    return reinterpret_cast<fp16_t*>(params.o_partial) + index_of(row) * Config::kHeadDimV + first_dim;
  });
}

template <class Config>
__device__ __forceinline__ void compute_output(const SparseDecodeParams& params, const PartPlan& plan,
                                               typename Config::Storage& smem) {
  tile::RingPosition<Config::kStages> ring;
  uint32_t count = 0;  // of the blocks before: its lowest bit is the index of p, the next the parity of p's barriers
  const int first = next_request<Config>(params, plan, plan.begin_req);
  if (first <= plan.end_req) {  // its Q, by warps that have nothing else to do yet
    const int row = first_query_row<2>(ptx::tid_x() / 32 - 4);
    request_query<Config, 2>(params, first, row, smem);
    ptx::cp_async_wait_all();
    ptx::bar_arrive(kQueryCopied, 384);
    encode_query<Config, 2>(row, smem);
    ptx::bar_arrive(kQueryEncoded, 384);
  }
  Output o;
  for (int req = plan.begin_req; req <= plan.end_req; req++) {
    int blocks_left;
    {
      const Fragment fragment = load_fragment<Config>(params, plan, req);
      blocks_left = fragment.end_block - fragment.begin_block;
    }
    const bool empty = blocks_left == 0;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[m][i] = 0.0f;
    for (; blocks_left > 0; blocks_left--) {
      tile::wait(smem_addr(&smem.k_full[ring.stage]), ring.phase);
      accumulate<Config>(o, smem, ring.stage, count);
      ptx::wgmma_wait_group<0>();
      // The last block's row factors are kept until inv_sum has been read.
      if (blocks_left > 1) arrive_once_per_warp(smem_addr(&smem.p_empty[count & 1]));
      count++;
      ring.advance();
    }
    const int slot = attention::slot_of(plan, req), half = output_half();
    const float* inv_sum = smem.factors[count - 1 & 1].inv_sum;
    if (empty) {
      // Whose inverse sums nobody writes: those of a row without keys are 0.
      ptx::bar_sync(kOutputBarrier + half, 128);  // no warp reads those of the request before any more
      smem.multiplier[half][ptx::tid_x() % 64] = 0.0f;
      ptx::bar_sync(kOutputBarrier + half, 128);
      inv_sum = smem.multiplier[half];
    }
    store_output<Config>(params, smem, half, slot, req, o, inv_sum);
    if (!empty) arrive_once_per_warp(smem_addr(&smem.p_empty[count - 1 & 1]));
  }
}

// ---- entry ------------------------------------------------------------------------------------------------------
template <class Config>
__device__ __forceinline__ void init_barriers(typename Config::Storage& smem) {
  for (int stage = 0; stage < Config::kStages; stage++) {
    ptx::mbarrier_init(smem_addr(&smem.k_full[stage]), 8);
    ptx::mbarrier_init(smem_addr(&smem.k_empty[stage]), 8);
  }
  for (int i = 0; i < 2; i++) {
    ptx::mbarrier_init(smem_addr(&smem.p_full[i]), 4);
    ptx::mbarrier_init(smem_addr(&smem.p_empty[i]), 8);
  }
  ptx::fence_mbarrier_init();
}

template <class Config>
__device__ __forceinline__ void kernel(const SparseDecodeParams& params) {
  using Storage = typename Config::Storage;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  Storage& smem = *reinterpret_cast<Storage*>(dynamic_smem);
  FLASHMLA_ASSERT(smem_addr(dynamic_smem) % 1024 == 0);
  if (threadIdx.x == 0) init_barriers<Config>(smem);
  if (threadIdx.x >= 64 && threadIdx.x < 128) {
    const QueryRow row = query_row<Config>(params, threadIdx.x - 64);
    smem.out_offset[threadIdx.x - 64] = row.exists ? row.token * params.out_stride_token + row.head * params.out_stride_head : kNoRow;
  }
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
  const PartPlan& plan = smem.plan;  // read where needed: registers are scarce in every role
  const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (group == 0) {
    ptx::setmaxnreg_inc<Config::kScoreRegisters>();
    compute_scores<Config>(params, plan, smem);
  } else if (group < 3) {
    ptx::setmaxnreg_inc<Config::kOutputRegisters>();
    compute_output<Config>(params, plan, smem);
  } else {
    ptx::setmaxnreg_dec<Config::kCopyRegisters>();
    copy_tokens<Config>(params, plan, smem);
  }
}

}  // namespace flashmla::sparse_decode
