"""NumPy mirrors of the structs in cuda_src/common/params.cuh and cuda_src/<op>/params.cuh. Drift between the two is a
compile error.

Pointers are uint64 device addresses; strides are int64 in elements; a tensor map is 128 bytes (tensor_map.encode).
"""

from __future__ import annotations

import numpy as np

_KINDS = {  # kind -> (NumPy format, bytes, alignment in C++)
    "ptr": ("<u8", 8, 8),
    "i64": ("<i8", 8, 8),
    "i32": ("<i4", 4, 4),
    "u32": ("<u4", 4, 4),
    "f32": ("<f4", 4, 4),
    "map": (("u1", (128,)), 128, 64),
}
_OUT = "out_stride_batch out_stride_token out_stride_head"
_LSE = "lse_stride_batch lse_stride_head lse_stride_token"



def _sparse_keys(prefix: str) -> list[tuple[str, str]]:
    """The members of a SparseKeys member called `prefix`."""
    groups = [
        ("ptr", "cache indices topk_length"),
        ("i64", "page_stride indices_stride_batch indices_stride_token"),
        ("i32", "topk num_pages page_size"),
        ("u32", "page_size_magic"),
        ("i32", "page_size_shift reserved"),
    ]
    return [(kind, " ".join(f"{prefix}.{name}" for name in names.split())) for kind, names in groups]


_FIELDS: dict[str, list[tuple[str, str]]] = {  # struct -> [(kind, names)] in the order of the C++ declaration
    "DenseDecodeParams": [
        ("map", "k_map partial_map"),
        ("ptr", "q out lse o_partial lse_partial cache_seqlens block_table metadata"),
        ("i64", f"q_stride_batch q_stride_token q_stride_head {_OUT} {_LSE} block_table_stride"),
        ("i32", "batch s_q heads_per_kv h_kv num_sm_parts causal page_size box_tokens max_seqlen"),
        ("f32", "scale_log2"),
        ("u32", "heads_per_kv_magic"),
        ("i32", "heads_per_kv_shift"),
    ],
    "SparseDecodeParams": [
        ("map", "k_map"),
        *_sparse_keys("main"),
        *_sparse_keys("extra"),
        ("ptr", "q out lse o_partial lse_partial metadata attn_sink block_table cache_seqlens"),
        ("i64", f"q_stride_batch q_stride_token q_stride_head {_OUT} {_LSE} block_table_stride"),
        ("i32", "batch s_q h_q num_sm_parts causal max_seqlen"),
        ("f32", "scale_log2"),
        ("u32", "h_q_magic"),
        ("i32", "h_q_shift whole_boxes"),
    ],
    "SparsePrefillParams": [
        ("ptr", "q kv indices topk_length attn_sink cu_seqlens_q cu_seqlens_kv out max_logits lse"),
        ("i64", "q_stride_token q_stride_head indices_stride_token out_stride_token out_stride_head"),
        ("i64", "max_logits_stride_token max_logits_stride_head lse_stride_token lse_stride_head"),
        ("i32", "items head_blocks"),
        ("u32", "head_blocks_magic"),
        ("i32", "head_blocks_shift h_q s_kv topk requests"),
        ("f32", "scale_log2"),
        ("i32", "kv_row_bytes"),
    ],
    "CombineParams": [
        ("ptr", "o_partial lse_partial out lse metadata attn_sink"),
        ("i64", f"{_OUT} {_LSE}"),
        ("i32", "batch s_q heads_per_kv h_kv num_sm_parts n_direct d_v warps_per_row_shift"),
        ("f32", "lse_in_scale"),
        ("u32", "heads_per_kv_magic"),
        ("i32", "heads_per_kv_shift column_groups_shift"),
    ],
    "SchedMetaParams": [
        ("ptr", "cache_seqlens metadata num_splits cost_prefix"),
        ("i32", "batch num_sm_parts block_size overhead_blocks fixed_seqlen reserved"),
    ],
    "KvQuantParams": [
        ("ptr", "kv cache"),
        ("i64", "kv_stride_page kv_stride_token cache_stride_page"),
        ("i32", "tokens page_size"),
        ("u32", "page_size_magic"),
        ("i32", "page_size_shift power_of_two_scales reserved"),
    ],
    "TokenIndicesParams": [
        ("ptr", "block_table positions indices"),
        ("i64", "block_table_stride positions_stride"),
        ("i32", "count per_request"),
        ("u32", "per_request_magic"),
        ("i32", "per_request_shift table_width page_size"),
        ("u32", "page_size_magic"),
        ("i32", "page_size_shift"),
    ],
}


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _layout(fields: list[tuple[str, str]]) -> np.dtype:
    """The dtype with the offsets that C++ gives these fields."""
    names, formats, offsets, end, widest = [], [], [], 0, 1
    for kind, group in fields:
        numpy_format, size, alignment = _KINDS[kind]
        widest = max(widest, alignment)
        for name in group.split():
            offset = _round_up(end, alignment)
            names.append(name)
            formats.append(numpy_format)
            offsets.append(offset)
            end = offset + size
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": _round_up(end, widest)})


STRUCTS: dict[str, np.dtype] = {name: _layout(fields) for name, fields in _FIELDS.items()}


def new(name: str) -> np.ndarray:
    """One zeroed record of struct `name`, shape (). Set fields with `record["field"] = value`, or
    (faster) all at once with `record[()] = (...)` in the order of declaration."""
    return np.zeros((), STRUCTS[name])


def divisor(value: int) -> tuple[int, int]:
    """(magic, shift) with which common/math.cuh's divide_by_magic divides by `value` >= 1."""
    shift = max(value - 1, 0).bit_length() - 1
    return (0, 0) if value == 1 else (-(-(1 << 32 + shift) // value), shift)


def static_asserts(name: str) -> str:
    """C++ static_asserts that hold flashmla::`name` to this module's layout."""
    dtype, struct_name = STRUCTS[name], f"flashmla::{name}"
    lines = [f'static_assert(sizeof({struct_name}) == {dtype.itemsize}, "{name}: size differs from params.py");']
    for field in dtype.names:
        field_dtype, offset = dtype.fields[field][:2]
        offset_of = f"__INTADDR__(&(({struct_name}*)0)->{field})"  # NVRTC knows no offsetof
        size_of = f"sizeof({struct_name}::{field})"
        lines.append(
            f"static_assert({offset_of} == {offset} && {size_of} == {field_dtype.itemsize}, "
            f'"{name}.{field}: layout differs from params.py");'
        )
    return "\n".join(lines)
