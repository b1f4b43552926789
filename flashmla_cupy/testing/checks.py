"""What `validate` runs, op by op: each check is a name and a function that returns the worst errors it saw."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.ops.sched_meta import overhead_blocks
from flashmla_cupy.reference import combine as reference_combine
from flashmla_cupy.reference import dense_decode as reference_decode
from flashmla_cupy.reference import sched_meta as reference_sched
from flashmla_cupy.testing import (
    cases,
    inputs,
    kv_quant_checks,
    plain,
    prefill_checks,
    prefill_scenarios,
    scenarios,
    sparse_checks,
    sparse_scenarios,
)
from flashmla_cupy.testing.cases import HEAD_DIM_V, Case
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.guarded import run_guarded, same_bits
from flashmla_cupy.testing.inputs import Inputs
from flashmla_cupy.testing.machine import Machine

_PLAIN_SCORES_LIMIT, _PLAIN_TOKENS_LIMIT = 200_000, 5_000  # of the row-by-row check of the NumPy backend


@dataclass(frozen=True)
class Check:
    op: str
    name: str
    run: Callable[[], Errors]


def collect(ops: tuple[str, ...], suite: str, machine: Machine) -> list[Check]:
    """The checks of `ops` in `suite` that this machine can run."""
    build = {
        "dense_decode": _dense_checks,
        "sched_meta": _sched_meta_checks,
        "combine": _combine_checks,
        "sparse_decode": partial(_named_checks, "sparse_decode", (sparse_checks, sparse_scenarios)),
        "sparse_prefill": partial(_named_checks, "sparse_prefill", (prefill_checks, prefill_scenarios)),
        "kv_quant": partial(_named_checks, "kv_quant", (kv_quant_checks,)),
    }
    unknown = sorted(set(ops) - set(build))
    if unknown:
        raise ValueError(f"op: got {unknown[0]!r}, expected one of {', '.join(build)}")
    return [check for op in ops for check in build[op](suite, machine)]


def _named_checks(op: str, modules: tuple[Any, ...], suite: str, machine: Machine) -> list[Check]:
    rows = [row for module in modules for row in module.collect(suite, machine)]
    return [Check(op, name, partial(run, machine)) for name, run in rows]


OPS = ("sched_meta", "combine", "dense_decode", "kv_quant", "sparse_decode", "sparse_prefill")


# ---- dense decode


def call(case: Case, given: Inputs) -> tuple[Any, Any]:
    """The call of a user, with out= and lse=."""
    plan = (None, None)
    if case.with_metadata:
        plan = flashmla_cupy.get_mla_metadata(
            given.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q, False, None
        )
    return flashmla_cupy.flash_mla_with_kvcache(
        given.q,
        given.k_cache,
        given.block_table,
        given.cache_seqlens,
        HEAD_DIM_V,
        *plan,
        case.causal,
        False,
        None,
        softmax_scale=case.softmax_scale,
        out=given.out.array,
        lse=given.lse.array,
    )


def references(case: Case, given: Inputs, xp: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(out, lse) of the exact and of the rounding reference, float64."""
    return tuple(
        reference_decode.attend(
            given.q,
            given.k_cache,
            given.block_table,
            given.cache_seqlens,
            HEAD_DIM_V,
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            mode=mode,
            round_output=False,
            xp=xp,
        )
        for mode in ("exact", "rounded")
    )


def dense(case: Case, machine: Machine) -> Errors:
    """Kernel first, then the reference; guard bands; the same bits again; the same bits under other hostile content."""
    xp = machine.xp
    given = inputs.build(case, xp)
    first = _run_guarded(case, given, machine)
    if isinstance(first, Errors):
        return first
    given.out.refill(), given.lse.refill()
    again = _run_guarded(case, given, machine)
    if isinstance(again, Errors):
        return again
    if not same_bits(first, again):
        return Errors(message="two calls with the same input differ")
    if machine.gpu:
        exact, rounded = references(case, given, xp)
    else:
        scale = case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
        exact = plain.attend(given.q, given.k_cache, given.block_table, case.lengths, HEAD_DIM_V, scale, case.causal)
        _, rounded = references(case, given, xp)
    errors = compare(given.out.array, given.lse.array, exact, rounded, xp)
    if errors.message is None and case.unchanged:
        for variant in case.variants():
            other = _run_guarded(variant, inputs.build(variant, xp), machine)
            if isinstance(other, Errors):
                return other
            if not same_bits(first, other):
                what = f"poison={variant.poison} unused_entry={variant.unused_entry} table={variant.table}"
                return Errors(errors.out, errors.lse, f"bits change with content that must not matter ({what})")
    return errors


def _run_guarded(case: Case, given: Inputs, machine: Machine) -> tuple[Any, Any] | Errors:
    return run_guarded(lambda: call(case, given), given, machine)


def _dense_checks(suite: str, machine: Machine) -> list[Check]:
    rows = cases.suite(suite)
    if not machine.gpu:
        rows = [
            case
            for case in rows
            if case.scores <= _PLAIN_SCORES_LIMIT
            and case.batch <= 40
            and sum(case.lengths) * case.h_kv <= _PLAIN_TOKENS_LIMIT
        ]
    checks = [Check("dense_decode", case.name, partial(dense, case, machine)) for case in rows]
    if suite != "smoke":
        checks += [Check("dense_decode", name, partial(run, machine)) for name, run in scenarios.dense_decode(machine)]
    return checks


# ---- sched_meta


def sched_meta(lengths: np.ndarray, q_rows: int, h_kv: int, machine: Machine, topk: int | None = None) -> Errors:
    """Plan and split counts equal the NumPy twin's, bit for bit. q_rows: s_q * h_q / h_kv."""
    device_lengths = machine.xp.asarray(lengths)
    metadata, num_splits = flashmla_cupy.get_mla_metadata(device_lengths, q_rows, h_kv, q_rows * h_kv, False, topk)
    machine.wait()
    parts = max(1, machine.sm_count // h_kv // -(-q_rows // 64))
    if machine.gpu and metadata.shape[0] != parts:
        return Errors(message=f"metadata: got {metadata.shape[0]} parts, expected {parts}")
    parts = int(metadata.shape[0])
    expected = reference_sched.plan(lengths, parts, topk=topk,
                                    overhead_blocks=overhead_blocks(len(lengths), parts, topk is not None))
    for label, got, want in (("metadata", metadata, expected[0]), ("num_splits", num_splits, expected[1])):
        got = got.get() if machine.gpu else got
        if got.dtype != np.int32 or got.shape != want.shape:
            return Errors(message=f"{label}: got {got.dtype} {got.shape}, expected int32 {want.shape}")
        if not np.array_equal(got, want):
            place = tuple(int(i) for i in np.argwhere(got != want)[0])
            return Errors(
                message=f"{label}: differs from the NumPy twin at {place}: got {got[place]}, expected {want[place]}"
            )
    if not machine.gpu:
        return _plan_covers(lengths if topk is None else np.full_like(lengths, topk), metadata, num_splits)
    return Errors()


def _plan_covers(lengths: np.ndarray, metadata: np.ndarray, num_splits: np.ndarray) -> Errors:
    """Every block of every request exactly once, and as many fragments as num_splits says."""
    fragments: dict[int, list[tuple[int, int]]] = {}
    blocks = [max(0, -(-int(length) // 64)) for length in lengths]
    for begin, begin_block, end, end_block, *_ in metadata.tolist():
        if begin >= len(blocks):
            continue
        for request in range(begin, min(end, len(blocks) - 1) + 1):
            span = (begin_block if request == begin else 0, end_block if request == end else blocks[request])
            fragments.setdefault(request, []).append(span)
    for request, total in enumerate(blocks):
        spans = fragments.get(request, [])
        joined = all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        if not spans or spans[0][0] != 0 or spans[-1][1] != total or not joined:
            return Errors(message=f"metadata: request {request} of {total} blocks is covered as {spans}")
        if len(spans) != num_splits[request + 1] - num_splits[request]:
            return Errors(message=f"num_splits: request {request} has {len(spans)} fragments")
    return Errors()


def sched_meta_lengths(suite: str) -> list[tuple[str, np.ndarray, int, int, int | None]]:
    """(name, lengths, q_rows, h_kv, topk) of each plan that is checked."""
    rng = np.random.default_rng(7)
    batches = (
        (1, 2, 7, 33, 128)
        if suite == "smoke"
        else (1, 2, 31, 32, 33, 128, 1023, 1024, 1025, 11622, 11623, 32768, 100000)
    )
    rows = []
    for batch in batches:
        drawn = {
            "even": np.full(batch, 4096),
            "mixed": rng.integers(0, 8192, batch),
            "zero": np.zeros(batch),
            "long tail": np.where(rng.random(batch) < 0.02, 131072, rng.integers(0, 200, batch)),
            "negative": rng.integers(-5, 70, batch),
        }
        for name, lengths in drawn.items():
            q_rows, h_kv = random.Random(batch).choice(
                ((128, 1), (16, 1), (256, 1), (8, 8), (1, 3), (640, 1), (64, 200))
            )
            rows.append(
                (f"batch {batch} {name}, {q_rows} rows, h_kv {h_kv}", lengths.astype(np.int32), q_rows, h_kv, None)
            )
    rows.append(("topk 2048", np.zeros(64, np.int32), 128, 1, 2048))
    return rows


def _sched_meta_checks(suite: str, machine: Machine) -> list[Check]:
    limit = 100000 if machine.gpu else 2000
    return [
        Check("sched_meta", name, partial(sched_meta, lengths, q_rows, h_kv, machine, topk))
        for name, lengths, q_rows, h_kv, topk in sched_meta_lengths(suite)
        if len(lengths) <= limit
    ]


# ---- combine


def combine(count: int, shape: tuple[int, int, int], dtype: str, machine: Machine) -> Errors:
    """merge_states of `count` partial results of shape (batch, s_q, h_q) against the float64 merge."""
    xp, (batch, s_q, h_q) = machine.xp, shape
    outs = inputs.random_array(xp, dtype, (count, *shape, HEAD_DIM_V), seed=count)
    lses = inputs.random_array(xp, "float32", (count, batch, h_q, s_q), seed=count + 1) * np.float32(3.0)
    empty = inputs.random_array(xp, "float32", lses.shape, seed=count + 2) > 1.0
    if h_q > 1:
        empty[:, 0, 1] = True  # nothing attended to in any part
    lses = xp.where(empty, np.float32(-np.inf), lses)
    bits = outs.view(np.uint32 if dtype == "float32" else np.uint16)
    outs = xp.where(xp.moveaxis(empty, 2, 3)[..., None], bits.dtype.type(0), bits).view(outs.dtype)
    out, lse = flashmla_cupy.merge_states(outs, lses)
    machine.wait()
    wide = outs.astype(np.float32).astype(np.float64)
    # The merge over all partials at once, by definition and apart from the library's own reference.
    peak = xp.where(xp.isneginf(lses.max(axis=0)), 0.0, lses.astype(np.float64).max(axis=0))
    weights = xp.exp(lses.astype(np.float64) - peak)
    total = weights.sum(axis=0)
    shares = xp.where(total > 0, weights / xp.where(total > 0, total, 1.0), 0.0)
    exact_out = (wide * xp.moveaxis(shares, 2, 3)[..., None]).sum(axis=0)
    exact_lse = xp.where(total > 0, peak + xp.log(xp.where(total > 0, total, 1.0)), -np.inf)
    if machine.gpu:
        exact_out, exact_lse = reference_combine.merge(outs, lses.swapaxes(2, 3), xp=xp)
        exact_lse = exact_lse.swapaxes(1, 2)
    rounded = exact_out.astype(np.float32).astype(out.dtype).astype(np.float32).astype(np.float64)
    if out.dtype == np.float32:
        rounded = rounded + 2e-6 * abs(exact_out).max()
    return compare(out, lse, (exact_out, exact_lse), (rounded, exact_lse), xp)


COMBINE_COUNTS = (1, 2, 3, 32, 33, 160, 161, 192, 256, 257)


def _combine_checks(suite: str, machine: Machine) -> list[Check]:
    counts = (1, 2, 33) if suite == "smoke" else COMBINE_COUNTS
    dtypes = ("bfloat16", "float32") if suite == "smoke" else ("bfloat16", "float16", "float32")
    shapes = ((2, 1, 16),) if suite == "smoke" else ((2, 1, 16), (1, 3, 5), (1, 1, 1))
    return [
        Check(
            "combine",
            f"{count} partials {dtype} {'x'.join(map(str, shape))}",
            partial(combine, count, shape, dtype, machine),
        )
        for count in counts
        for dtype in dtypes
        for shape in shapes
    ]
