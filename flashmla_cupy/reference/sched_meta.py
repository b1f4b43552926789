"""Tile-scheduler plan: NumPy twin of ``cuda_src/sched_meta``, bit-identical to it.

A request of ``n`` KV blocks costs ``n + overhead_blocks``, and so does every further fragment of it. Requests lie
one behind the other on a line of costs; request ``i`` begins at ``prefix[i]``. A part that starts at position ``x``
(``prefix[i] + begin_block``) may spend ``payload = ceil(total / parts) + overhead_blocks``, so it can reach
``x + payload``. It ends at the last request boundary within reach, unless that leaves more than the overhead of one
more fragment unspent: then it goes on and cuts the next request. Cutting at block ``c`` puts the next part at
``prefix[j] + c``: what remains of the request costs ``prefix[j + 1] - (prefix[j] + c)``, its overhead included.
Every part but the last advances by at least ``ceil(total / parts)``, so the parts always suffice.

Where all requests cost the same, parts of ``ceil(batch / parts)`` whole ones may be longer than that: by
``WHOLE_BLOCKS`` blocks, and by one part in ``WHOLE_SHARE``, at most. Then every part takes so many, and no request is
cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WHOLE_BLOCKS, WHOLE_SHARE = 16, 16
METADATA_FIELDS = (
    "begin_req", "begin_block", "end_req", "end_block", "begin_split", "first_is_split", "last_is_split", "reserved",
)  # fmt: skip


def plan(
    cache_seqlens: Any,
    num_sm_parts: int,
    *,
    block_size: int = 64,
    overhead_blocks: int = 4,
    topk: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Spread the KV blocks of all requests over ``num_sm_parts`` parts of about equal cost.

    Args:
        cache_seqlens: ``(batch,)`` integers, tokens of each request; negative counts as 0.
        num_sm_parts: number of parts, at least 1.
        block_size: tokens of a KV block.
        overhead_blocks: fixed cost of one fragment in units of KV blocks, at least 1.
        topk: if given, every request has this many tokens and only the length of ``cache_seqlens`` matters.

    Returns:
        ``metadata`` int32 ``(num_sm_parts, 8)``, columns ``METADATA_FIELDS``: ``end_req`` is inclusive, ``end_block``
        exclusive within it; ``begin_split`` is the index of the first fragment within ``begin_req``;
        ``first_is_split`` and ``last_is_split`` tell that other parts share ``begin_req`` / ``end_req``. A part
        without work has ``begin_req = end_req = batch`` and zeros.
        ``num_splits`` int32 ``(batch + 1,)``, exclusive prefix sum of the fragments of each request (at least 1 each).

    Raises:
        ValueError: a scalar below its minimum, or ``cache_seqlens`` not one-dimensional.
        TypeError: ``cache_seqlens`` not of integers.
    """
    lengths = np.asarray(cache_seqlens)
    if lengths.ndim != 1:
        raise ValueError(f"cache_seqlens: got {lengths.ndim} dimensions, expected 1")
    if lengths.size and lengths.dtype.kind not in "iu":
        raise TypeError(f"cache_seqlens: got {lengths.dtype}, expected integers")
    scalars = {"num_sm_parts": num_sm_parts, "block_size": block_size, "overhead_blocks": overhead_blocks}
    for name, value in scalars.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")

    batch = lengths.size
    lengths = np.maximum(lengths.astype(np.int64), 0) if topk is None else np.full(batch, max(topk, 0), np.int64)
    blocks = lengths // block_size + (lengths % block_size != 0)
    prefix = np.zeros(batch + 1, np.int64)
    np.cumsum(blocks + overhead_blocks, out=prefix[1:])

    stride, positions = _walk(prefix, num_sm_parts, overhead_blocks)
    request = np.searchsorted(prefix, positions, side="right") - 1
    block = positions - prefix[request]
    cut = block > 0  # part p begins in the middle of a request

    metadata = np.zeros((num_sm_parts, 8), np.int32)
    metadata[:, 0] = metadata[:, 2] = batch
    used = request[:-1] < batch
    begin_req, begin_block, begin_cut = request[:-1][used], block[:-1][used], cut[:-1][used]
    end_cut = cut[1:][used]
    end_req = request[1:][used] - ~end_cut
    end_block = np.where(end_cut, block[1:][used], blocks[end_req])
    alone = begin_req == end_req
    # Between its first and last fragment a request is cut every `stride` blocks, and the first cut is at most there.
    begin_split = -(-begin_block // stride)
    columns = (begin_req, begin_block, end_req, end_block, begin_split,
               begin_cut | (alone & end_cut), end_cut | (alone & begin_cut))  # fmt: skip
    metadata[used, :7] = np.stack(columns, axis=1)

    cuts_before = np.searchsorted(request[cut], np.arange(batch + 1), side="left")
    return metadata, (np.arange(batch + 1) + cuts_before).astype(np.int32)


def cuts_nothing(batch: int, num_sm_parts: int, blocks: int, overhead_blocks: int) -> bool:
    """Whether ``plan`` cuts no request, where each has ``blocks`` blocks: parts of ``ceil(batch / num_sm_parts)``."""
    cost = blocks + overhead_blocks
    stride, whole = -(-batch * cost // num_sm_parts), -(-batch // num_sm_parts) * cost
    return whole <= stride + max(overhead_blocks, min(WHOLE_BLOCKS, stride // WHOLE_SHARE))


def _walk(prefix: np.ndarray, num_sm_parts: int, overhead_blocks: int) -> tuple[int, np.ndarray]:
    """Least distance between the begins of two parts (payload - overhead), and the begins, int64 ``(parts + 1,)``."""
    total, batch = int(prefix[-1]), len(prefix) - 1
    stride = max(1, -(-total // num_sm_parts))
    if batch and (np.diff(prefix) * batch == total).all():
        whole = -(-batch // num_sm_parts) * (total // batch)
        if whole > stride and whole - stride <= min(WHOLE_BLOCKS, stride // WHOLE_SHARE):
            stride = whole
    positions = np.full(num_sm_parts + 1, total, np.int64)
    position = 0
    for part in range(num_sm_parts):
        positions[part] = position
        reach = position + stride + overhead_blocks
        if reach >= total:
            break
        boundary = int(prefix[np.searchsorted(prefix, reach, side="right") - 1])
        position = max(boundary, position + stride)
    return stride, positions
