// Which keys a CTA of the FP8 decode attends to: its query rows, the blocks of its requests, and where the tokens of a block
// lie in the cache.
#pragma once
#include "attention/split.cuh"
#include "common/math.cuh"
#include "common/params.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/special_register.cuh"
#include "sparse_decode/config.cuh"

namespace flashmla::sparse_decode {

using attention::PartPlan;

constexpr unsigned kFullWarp = 0xffffffffu;

// A query row of this CTA: a head of one query token, or (paged, where tokens share their keys) of any.
struct QueryRow {
  int token, head;
  bool exists;
};
// blockIdx is read anew: what is derived from it would stay in registers, which are scarce.
template <class Config>
__device__ __forceinline__ QueryRow query_row(const SparseDecodeParams& params, int local_row) {
  const int row = ptx::ctaid_x() * Config::kRows + local_row;
  if constexpr (!Config::kPaged) return {(int)ptx::ctaid_y(), row, row < params.h_q};
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
  int begin_block, end_block;
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
  return {main_blocks, f.begin_block, f.end_block};
}

// Loads of names are unconditional, for a value that is loaded or else made up is moved, which waits for the load.
__device__ const int32_t kNoIndex[1] = {-1};

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

// Where a token's codes lie, null if it does not exist, and how many bytes further its scales.
struct TokenAddress {
  const uint8_t* row;
  int32_t to_scales;
};
template <class Config>
__device__ __forceinline__ TokenAddress locate(const SparseKeys& keys, int page, int place) {
  using Format = typename Config::Format;
  if (page < 0 || page >= keys.num_pages || place < 0) return {nullptr, 0};
  const int64_t row = Format::row_offset(place);
  return {keys.cache + page * keys.page_stride + row, (int32_t)(Format::scale_offset(place, keys.page_size) - row)};
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
  const uint64_t row = __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(at.row), lane);
  return {reinterpret_cast<const uint8_t*>(row), Format::kScalesInRow ? 0 : __shfl_sync(kFullWarp, at.to_scales, lane)};
}

}  // namespace flashmla::sparse_decode
