"""Dense decode checks that are more than one call: far pages, stale plans, graphs, repetition, merging, arguments.

Each function takes the machine (and sizes that the tests may lower) and returns the worst errors it saw.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import flashmla_cupy
from flashmla_cupy.reference import combine as reference_combine
from flashmla_cupy.reference import dense_decode as reference_decode
from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V, Case
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.guarded import refuses
from flashmla_cupy.testing.machine import Machine

_FAR_PAGES = (29127, 29128, 58254, 58255, 116508, 116509)
_FAR_POOL_BYTES = (_FAR_PAGES[-1] + 1) * 64 * 576 * 2


def dense_decode(machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of the scenarios that this machine can run."""
    rows: list[tuple[str, Callable[[Machine], Errors]]] = [
        ("cache cut in two and merged equals one run", merge_halves),
        ("wrong arguments are refused", arguments),
        ("odd arguments: right or refused", odd_arguments),
    ]
    if not machine.gpu:
        return rows
    rows += [
        ("plan made for other lengths", stale_metadata),
        ("graph follows lengths changed in place", graph_lengths),
        ("10,000 repetitions, PDL on", partial(repetition, pdl=True)),
        ("10,000 repetitions, PDL off", partial(repetition, pdl=False)),
    ]
    if machine.xp.cuda.runtime.memGetInfo()[0] > 1.2 * _FAR_POOL_BYTES:
        rows.append(("pages beyond 2^31 elements", far_pages))
    return rows


def worst(rows: list[Errors]) -> Errors:
    """The worst of several, with the first message."""
    message = next((row.message for row in rows if row.message), None)
    return Errors(max((row.out for row in rows), default=0.0), max((row.lse for row in rows), default=0.0), message)


def _plan(case: Case, lengths: Any) -> tuple[Any, Any]:
    return flashmla_cupy.get_mla_metadata(lengths, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q, False, None)


def _decode(
    case: Case, given: inputs.Inputs, plan: tuple[Any, Any], lengths: Any = None, **keywords: Any
) -> tuple[Any, Any]:
    return flashmla_cupy.flash_mla_with_kvcache(
        given.q,
        given.k_cache,
        given.block_table,
        given.cache_seqlens if lengths is None else lengths,
        HEAD_DIM_V,
        *plan,
        case.causal,
        False,
        None,
        softmax_scale=case.softmax_scale,
        **keywords,
    )


def _check(case: Case, given: inputs.Inputs, lengths: Any, out: Any, lse: Any, machine: Machine, label: str) -> Errors:
    exact, rounded = (
        reference_decode.attend(
            given.q,
            given.k_cache,
            given.block_table,
            lengths,
            HEAD_DIM_V,
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            mode=mode,
            xp=machine.xp,
        )
        for mode in ("exact", "rounded")
    )
    errors = compare(out, lse, exact, rounded, machine.xp)
    return errors if errors.message is None else replace(errors, message=f"{label}: {errors.message}")


def far_pages(machine: Machine) -> Errors:
    """A page far into a large pool gives the bits of the same page at the start."""
    message = _far_pages(machine)
    machine.free()
    return Errors(message=message)


def _far_pages(machine: Machine) -> str | None:
    xp = machine.xp
    pool = xp.full((_FAR_PAGES[-1] + 1, 64, 1, 576), 0x7FC0, np.uint16)
    pages = inputs.random_array(xp, "bfloat16", (len(_FAR_PAGES), 64, 1, 576), seed=3).view(np.uint16)
    near, far = np.arange(len(_FAR_PAGES), dtype=np.int32), np.asarray(_FAR_PAGES, np.int32)
    for page, target in zip(pages, _FAR_PAGES, strict=True):
        pool[target] = page
    pool[: len(near)] = pages
    cache, lengths = pool.view(ml_dtypes.bfloat16), xp.asarray(np.asarray([64 * 6 - 5, 64, 100], np.int32))
    for h_q in (16, 128):
        q = inputs.random_array(xp, "bfloat16", (3, 1, h_q, 576), seed=4)
        outs = []
        for ids in (near, far):
            table = xp.asarray(np.stack([ids, np.roll(ids, 2), np.roll(ids, 1)]))
            outs.append(flashmla_cupy.flash_mla_with_kvcache(q, cache, table, lengths, HEAD_DIM_V)[0].view(np.uint16))
        machine.wait()
        if not bool((outs[0] == outs[1]).all()):
            return f"h_q {h_q}: pages {_FAR_PAGES} differ from the same data on the first pages"
    return None


def stale_metadata(machine: Machine) -> Errors:
    """The plan is a hint: made for other lengths it may balance badly, the result stays right."""
    xp, rows = machine.xp, []
    planned = (64, 1000, 4096, 0, 777)
    others = (
        (65, 1001, 4097, 1, 778),
        (3000, 4096, 4096, 4000, 3333),
        (1, 20, 64, 0, 2),
        (0, 0, 0, 0, 0),
        (4096, 0, 0, 0, 0),
    )
    for h_q, s_q, causal in ((16, 1, False), (128, 1, False), (64, 2, True)):
        case = Case((4160,) * 5, h_q=h_q, s_q=s_q, causal=causal, seed=31)
        given = inputs.build(case, xp)
        for made_for, used_with in [(planned, row) for row in others] + [(row, planned) for row in others]:
            plan = _plan(case, xp.asarray(np.asarray(made_for, np.int32)))
            lengths = xp.asarray(np.asarray(used_with, np.int32))
            out, lse = _decode(case, given, plan, lengths)
            machine.wait()
            rows.append(_check(case, given, lengths, out, lse, machine, f"plan for {made_for}, lengths {used_with}"))
    return worst(rows)


def graph_lengths(machine: Machine) -> Errors:
    """A graph of metadata and decode, captured at zero and at full length, follows the lengths in the buffer."""
    xp, rows = machine.xp, []
    for h_q, start in ((16, 0), (128, 0), (128, 4096), (64, 4096)):
        case = Case((4096, 4096, 4096), h_q=h_q, s_q=2, causal=True, seed=41)
        given = inputs.build(case, xp)
        lengths = xp.full(3, start, np.int32)
        out, lse = given.out.array, given.lse.array
        stream = xp.cuda.Stream(non_blocking=True)
        machine.wait()
        with stream:
            _decode(
                case, given, _plan(case, lengths), lengths, out=out, lse=lse
            )  # loads kernels, fills the memory pool
            stream.synchronize()
            stream.begin_capture()
            plan = _plan(case, lengths)
            _decode(case, given, plan, lengths, out=out, lse=lse)
            graph = stream.end_capture()
            for values in ((1, 64, 65), (4096, 4096, 4096), (0, 0, 0), (4096, 0, 17), (3000, 1, 2999), (start,) * 3):
                lengths[...] = xp.asarray(np.asarray(values, np.int32))
                given.out.refill(), given.lse.refill()
                graph.launch(stream)
                machine.wait()
                rows.append(
                    _check(case, given, lengths, out, lse, machine, f"captured at {start}, replayed at {values}")
                )
    return worst(rows)


def repetition(machine: Machine, pdl: bool, iterations: int = 10_000) -> Errors:
    """decode, combine, a user's kernel that reads and wipes the output, again: the same bits every time."""
    from flashmla_cupy.ops._plans import clear_plans
    from flashmla_cupy.runtime import compile as runtime_compile
    from flashmla_cupy.runtime import env

    def reload() -> None:
        """Kernels read the variable when they are loaded."""
        runtime_compile.forget(), clear_plans()

    xp = machine.xp
    check = xp.ElementwiseKernel(
        "T expected, T wipe",
        "T value, raw int32 count",
        "if (value != expected) atomicAdd(&count[0], 1); value = wipe",
        "flashmla_check_bits",
    )
    with mock.patch.dict(os.environ, {env.DISABLE_PDL.name: "0" if pdl else "1"}):
        reload()
        try:
            for lengths in ((4096,), (64,) * 140, (20000, 3, 700)):
                case = Case(lengths, h_q=64, seed=51)
                given = inputs.build(case, xp)
                plan, out, lse = _plan(case, given.cache_seqlens), given.out.array, given.lse.array
                _decode(case, given, plan, out=out, lse=lse)
                bits = out.view(np.uint16)
                expected, count = bits.copy(), xp.zeros(1, np.int32)
                for _ in range(iterations // 3):
                    _decode(case, given, plan, out=out, lse=lse)
                    check(expected, np.uint16(0x7FFF), bits, count)
                machine.wait(60)
                if int(count[0]):
                    return Errors(
                        message=f"lengths {lengths[:3]}: {int(count[0])} elements changed over the repetitions"
                    )
        finally:
            reload()
    return Errors()


def merge_halves(machine: Machine) -> Errors:
    """KV cut in two, each half attended to, merged with merge_states: what one run over all of it gives."""
    xp, rows = machine.xp, []
    scales = (0.01, 1.0, 0.1352337788608801) if machine.gpu else (0.1,)
    for scale in scales:
        case = Case((320, 200) if machine.gpu else (130, 100), h_q=16, s_q=2, softmax_scale=scale, seed=61)
        given, cut = inputs.build(case, xp), 64
        whole = given.cache_seqlens
        halves = ((given.block_table[:, :1], xp.minimum(whole, cut)), (given.block_table[:, 1:], whole - cut))
        outs, lses, exact = [], [], []
        for table, lengths in halves:
            out, lse = flashmla_cupy.flash_mla_with_kvcache(
                given.q, given.k_cache, table, lengths.astype(np.int32), HEAD_DIM_V, softmax_scale=scale
            )
            outs.append(out), lses.append(lse)
            exact.append(
                reference_decode.attend(
                    given.q,
                    given.k_cache,
                    table,
                    lengths.astype(np.int32),
                    HEAD_DIM_V,
                    softmax_scale=scale,
                    mode="rounded",
                    xp=xp,
                )
            )
        merged = flashmla_cupy.merge_states(xp.stack(outs), xp.stack(lses))
        machine.wait()
        truth = reference_decode.attend(
            given.q, given.k_cache, given.block_table, whole, HEAD_DIM_V, softmax_scale=scale, mode="exact", xp=xp
        )
        best, _ = reference_combine.merge(
            xp.stack([out for out, _ in exact]), xp.stack([lse.swapaxes(1, 2) for _, lse in exact]), xp=xp
        )
        best = best.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32).astype(np.float64)
        rows.append(compare(*merged, truth, (best, truth[1]), xp))
    return worst(rows)


def arguments(machine: Machine) -> Errors:
    """A wrong dtype, shape, or missing argument raises before any launch, with a message that names it."""
    xp = machine.xp
    case = Case((70, 64), h_q=16, seed=71)
    given = inputs.build(case, xp)
    good = {
        "q": given.q,
        "k_cache": given.k_cache,
        "block_table": given.block_table,
        "cache_seqlens": given.cache_seqlens,
    }
    plan = _plan(case, given.cache_seqlens)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": given.q.astype(np.float32)}),
        ("q", {"q": given.q[0]}),
        ("q", {"q": given.q[..., :300]}),
        ("k_cache", {"k_cache": given.k_cache[0]}),
        ("k_cache", {"k_cache": given.k_cache.view(np.float16)}),
        ("block_table", {"block_table": given.block_table.astype(np.float32)}),
        ("block_table", {"block_table": given.block_table[:1]}),
        ("cache_seqlens", {"cache_seqlens": given.cache_seqlens.astype(np.float32)}),
        ("cache_seqlens", {"cache_seqlens": given.cache_seqlens[:1]}),
        ("cache_seqlens", {"cache_seqlens": None}),
        ("head_dim_v", {"head_dim_v": 256}),
        ("num_splits", {"tile_scheduler_metadata": plan[0]}),
        ("tile_scheduler_metadata", {"num_splits": plan[1]}),
        ("out", {"out": xp.zeros((2, 1, 16, 512), np.float32)}),
        ("out", {"out": xp.zeros((2, 1, 15, 512), np.uint16).view(ml_dtypes.bfloat16)}),
        ("lse", {"lse": xp.zeros((2, 16, 2), np.float32)}),
    ]
    good["head_dim_v"] = HEAD_DIM_V
    return refuses(lambda **change: flashmla_cupy.flash_mla_with_kvcache(**{**good, **change}), wrong, machine)


def odd_arguments(machine: Machine) -> Errors:
    """Host or int64 lengths, strided lengths and tables, other memory orders, misaligned arrays: right or refused."""
    xp, rows = machine.xp, []
    case = Case((70, 64, 3), h_q=16, s_q=2, seed=81)
    given = inputs.build(case, xp)
    lengths, table, q_bits = given.cache_seqlens, given.block_table, given.q.view(np.uint16)
    twice, wide = xp.zeros(6, np.int32), xp.full((3, 9), -1, np.int32)
    twice[::2], wide[:, : table.shape[1]] = lengths, table
    misaligned = xp.zeros(q_bits.size + 1, np.uint16)
    misaligned[1:] = q_bits.reshape(-1)
    odd: list[tuple[str, dict[str, Any]]] = [
        ("lengths on the host", {"cache_seqlens": np.asarray(case.lengths, np.int32)}),
        ("int64 lengths", {"cache_seqlens": lengths.astype(np.int64)}),
        ("lengths[::2]", {"cache_seqlens": twice[::2]}),
        ("int64 table", {"block_table": table.astype(np.int64)}),
        ("table[:, :n]", {"block_table": wide[:, : table.shape[1]]}),
        ("Fortran order table", {"block_table": xp.asfortranarray(table)}),
        ("Fortran order q", {"q": xp.asfortranarray(q_bits).view(given.q.dtype)}),
        ("2-byte aligned q", {"q": misaligned[1:].reshape(q_bits.shape).view(given.q.dtype)}),
        ("float32 q", {"q": given.q.astype(np.float32)}),
    ]
    for name, change in odd:
        used = {"q": given.q, "k_cache": given.k_cache, "block_table": table, "cache_seqlens": lengths, **change}
        try:
            out, lse = flashmla_cupy.flash_mla_with_kvcache(*used.values(), HEAD_DIM_V)
        except (TypeError, ValueError, flashmla_cupy.FlashMLAError):
            continue
        machine.wait()
        rows.append(_check(case, given, lengths, out, lse, machine, name))
    return worst(rows)
