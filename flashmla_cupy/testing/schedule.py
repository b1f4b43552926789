"""The plan that `schedule` shows: which requests it is for, and what can be asked for."""

from __future__ import annotations

import re
from typing import Any

MAX_INT32 = 2**31 - 1  # lengths, and what the API takes for heads and tokens
MAX_REQUESTS = 65536  # in one picture


def parse_lengths(text: str) -> list[int]:
    """ "4096x2,65" -> [4096, 4096, 65]. Raises ValueError on anything else."""
    values: list[int] = []
    for word in map(str.strip, text.split(",")):
        found = re.fullmatch(r"([0-9]{1,20})(?:x([0-9]{1,20}))?", word)
        if found is None:
            raise ValueError(f"lengths: got {word!r}, expected a number or number x times, such as 4096x8")
        length, times = int(found[1]), int(found[2] or 1)
        if length > MAX_INT32:
            raise ValueError(f"lengths: got {length}, expected at most {MAX_INT32} (int32)")
        if not 1 <= times <= MAX_REQUESTS - len(values):
            raise ValueError(f"lengths: got {word!r}, expected 1 to {MAX_REQUESTS} requests in all")
        values += [length] * times
    return values


def draw_lengths(batch: int, h_q: int, s_q: int, mean: int, varlen: bool) -> list[int]:
    """As the rows of `bench` have them."""
    from flashmla_cupy.testing.bench_cases import BenchCase

    return [min(n, MAX_INT32) for n in BenchCase(batch, h_q, s_q, mean, varlen=varlen).lengths()]


def plan(lengths: list[int], h_q: int, h_kv: int, s_q: int, sm_count: int) -> tuple[Any, Any, Any]:
    """int32 lengths, metadata and num_splits. Raises ValueError for heads and tokens that get_mla_metadata refuses."""
    import numpy as np

    from flashmla_cupy.ops.sched_meta import num_sm_parts
    from flashmla_cupy.reference.sched_meta import plan as reference_plan

    if h_q % h_kv:
        raise ValueError(f"h-kv: got {h_kv}, expected a divisor of h-q = {h_q}")
    rows = s_q * h_q // h_kv
    if rows > MAX_INT32:
        raise ValueError(f"s-q: got {s_q}, expected s-q * h-q / h-kv = {rows} to be at most {MAX_INT32} (int32)")
    tokens = np.asarray(lengths, np.int32)
    return tokens, *reference_plan(tokens, num_sm_parts(sm_count, h_kv, rows, len(tokens)))
