"""FP8 decode checks that are more than one call: merging, stale plans, splits, graphs, repetition, arguments, pages.

Each function takes the machine (and sizes that the tests may lower) and returns the worst errors it saw.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import flashmla_cupy
from flashmla_cupy.kv_format import FORMATS
from flashmla_cupy.ops.sparse_decode import what_is_rounded
from flashmla_cupy.reference import sched_meta as reference_sched
from flashmla_cupy.reference import sparse_decode as reference
from flashmla_cupy.testing import fp8_dense_inputs, inputs, sparse_cases, sparse_inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V, INT_MAX, YARN_SCALE
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.fp8_dense_cases import Fp8DenseCase
from flashmla_cupy.testing.guarded import refuses, run_guarded, same_bits
from flashmla_cupy.testing.machine import Machine
from flashmla_cupy.testing.scenarios import worst
from flashmla_cupy.testing.sparse_cases import INT_MIN, SparseCase
from flashmla_cupy.testing.sparse_checks import call, call_dense, check, expected, kernel_references, on_kernel, plan

_FAR_PAGES = (51150, 51151, 102300, 102301, 116508, 116509)  # 2^31 and 2^32 bytes lie between two of them


def collect(suite: str, machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of what this machine can run; none in the smoke suite."""
    if suite == "smoke":
        return []
    rows: list[tuple[str, Callable[[Machine], Errors]]] = [
        ("list cut in two and merged equals one run", merge_halves),
        ("wrong arguments are refused", arguments),
        ("odd arguments: the same bits or refused", odd_arguments),
        ("block table and lengths are not looked at", unused_arguments),
        ("dense: pages that the cache does not have", missing_pages),
    ]
    if not machine.gpu:
        return rows
    rows += [
        ("plan made for another topk", stale_metadata),
        ("sink with 1, 2 and 8 splits", sink_with_splits),
        ("1,000 launches without a key", nothing_to_attend),
        ("graph follows indices and lengths changed in place", graph_contents),
    ]
    rows = [(f"{name}{label}", partial(on_kernel, check, label != ""))
            for name, check in rows for label in ("", " (codes)")]
    if machine.xp.cuda.runtime.memGetInfo()[0] > 1.2 * _FAR_PAGES[-1] * 64 * 656:
        rows.append(("slots beyond 2^31 and 2^32 bytes", partial(on_kernel, far_slots, True)))
    return [*rows, ("10,000 repetitions, PDL on", partial(on_kernel, partial(repetition, pdl=True), True)),
            ("10,000 repetitions, PDL off", partial(on_kernel, partial(repetition, pdl=False), False))]


def far_slots(machine: Machine) -> Errors:
    """Tokens far into a large pool give the bits of the same tokens at its start."""
    message = _far_slots(machine)
    machine.free()
    return Errors(message=message)


def _far_slots(machine: Machine) -> str | None:
    xp, count = machine.xp, len(_FAR_PAGES)
    pool = xp.full((_FAR_PAGES[-1] + 1, 64, 1, 656), 0xFF, np.uint8)
    tokens = sparse_inputs.random_tokens(xp, np.random.default_rng(3), FORMATS["v32"], count * 64, "quantized", 3)
    pages = tokens.reshape(count, 64, 1, 656)
    pool[:count] = pages
    for page, target in zip(pages, _FAR_PAGES, strict=True):
        pool[target] = page
    near = np.random.default_rng(4).integers(0, count * 64, (3, 1, 700))
    far = np.asarray(_FAR_PAGES)[near // 64] * 64 + near % 64
    for h_q in (16, 128):
        q = inputs.random_array(xp, "bfloat16", (3, 1, h_q, 576), seed=4)
        outs = [flashmla_cupy.flash_mla_with_kvcache(
            q, pool, None, None, HEAD_DIM_V, is_fp8_kvcache=True, indices=xp.asarray(slots.astype(np.int32))
        )[0].view(np.uint16) for slots in (near, far)]
        machine.wait()
        if not bool((outs[0] == outs[1]).all()):
            return f"h_q {h_q}: pages {_FAR_PAGES} differ from the same data on the first pages"
    return None


def merge_halves(machine: Machine) -> Errors:
    """A list cut in two, each half attended to, merged with merge_states: what one run over all of it gives."""
    xp, rows = machine.xp, []
    topk = 640 if machine.gpu else 100
    for scale in (0.01, 1.0, YARN_SCALE):
        case = SparseCase(topk, batch=2, h_q=16, softmax_scale=scale, q_gain=0.5, invalid="random", seed=61)
        given = sparse_inputs.build(case, xp)
        cut = topk // 3
        parts = []
        for half in (given.indices[..., :cut], given.indices[..., cut:]):
            parts.append(call(case, given, xp, indices=half, out=None, lse=None))
        merged = flashmla_cupy.merge_states(xp.stack([p[0] for p in parts]), xp.stack([p[1] for p in parts]))
        machine.wait()
        exact, rounded = expected(case, given, machine)
        # Both halves and the merged result are rounded: three roundings where one run has one.
        twice = exact[0] + 2.0 * (rounded[0] - exact[0])
        rows.append(compare(*merged, exact, (twice, exact[1]), xp))
    return worst(rows)


def arguments(machine: Machine) -> Errors:
    """A wrong dtype, shape, or missing argument raises before any launch, with a message that names it."""
    xp = machine.xp
    case = SparseCase(70, batch=2, h_q=16, extra_topk=64, sink="mixed", length="random", seed=71)
    given = sparse_inputs.build(case, xp)
    metadata, num_splits = plan(case, xp)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": given.q.astype(np.float32)}),
        ("k_cache", {"k_cache": given.k_cache[..., :584]}),
        ("is_fp8_kvcache", {"is_fp8_kvcache": False}),
        ("causal", {"causal": True}),
        ("indices", {"indices": given.indices[..., :0]}),
        ("indices", {"indices": given.indices[:1]}),
        ("indices", {"indices": given.indices.astype(np.float32)}),
        ("attn_sink", {"attn_sink": given.attn_sink[:-1]}),
        ("topk_length", {"topk_length": given.topk_length[:1]}),
        ("extra_indices", {"extra_indices": None}),
        ("extra_k_cache", {"extra_k_cache": given.extra_k_cache[0]}),
        ("num_splits", {"tile_scheduler_metadata": metadata}),
        ("tile_scheduler_metadata", {"num_splits": num_splits}),
        ("out", {"out": xp.zeros((2, 1, 16, 512), np.float32)}),
        ("lse", {"lse": xp.zeros((2, 16, 2), np.float32)}),
    ]
    good = {"q": given.q, "k_cache": given.k_cache, "block_table": None, "cache_seqlens": None,
            "head_dim_v": HEAD_DIM_V, "is_fp8_kvcache": True, **given.keywords()}
    return refuses(lambda **change: flashmla_cupy.flash_mla_with_kvcache(**{**good, **change}), wrong, machine)


def odd_arguments(machine: Machine) -> Errors:
    """int64, strided, Fortran-order and host integers, a 4-axis index list: the same bits as plain ones, or refused."""
    xp = machine.xp
    case = SparseCase(70, batch=3, s_q=2, h_q=16, length="random", invalid="random", seed=81)
    given = sparse_inputs.build(case, xp)
    expected_bits = run_guarded(lambda: call(case, given, xp), given, machine)
    if isinstance(expected_bits, Errors):
        return expected_bits
    indices, lengths = given.indices, given.topk_length
    wide, twice = xp.full((3, 2, 140), -7, np.int32), xp.zeros(6, np.int32)
    wide[..., ::2], twice[::2] = indices, lengths
    q_bits = given.q.view(np.uint16)
    misaligned = xp.zeros(q_bits.size + 1, np.uint16)
    misaligned[1:] = q_bits.reshape(-1)
    odd: list[tuple[str, dict[str, Any]]] = [
        ("int64 indices", {"indices": indices.astype(np.int64)}),
        ("indices[..., ::2]", {"indices": wide[..., ::2]}),
        ("Fortran order indices", {"indices": xp.asfortranarray(indices)}),
        ("4-axis indices", {"indices": indices[:, :, None]}),
        ("lengths[::2]", {"topk_length": twice[::2]}),
        ("int64 lengths", {"topk_length": lengths.astype(np.int64)}),
        ("lengths on the host", {"topk_length": lengths.get() if machine.gpu else lengths.tolist()}),
        ("Fortran order q", {"q": xp.asfortranarray(q_bits).view(given.q.dtype)}),
        ("2-byte aligned q", {"q": misaligned[1:].reshape(q_bits.shape).view(given.q.dtype)}),
    ]
    for name, change in odd:
        given.out.refill(), given.lse.refill()
        try:
            bits = run_guarded(partial(call, case, given, xp, **change), given, machine)
        except (TypeError, ValueError, flashmla_cupy.FlashMLAError):
            continue
        if isinstance(bits, Errors):
            return replace(bits, message=f"{name}: {bits.message}")
        if not same_bits(bits, expected_bits):
            return Errors(message=f"{name}: bits differ from those of plain arguments")
    call(case, given, xp)  # the last odd one may have been refused
    machine.wait()
    return check(case, given, machine, "plain arguments")


def unused_arguments(machine: Machine) -> Errors:
    """With indices the block table and the lengths of the cache have no effect, whatever they hold."""
    xp = machine.xp
    case = SparseCase(64, batch=2, h_q=16, seed=91)
    given = sparse_inputs.build(case, xp)
    first = run_guarded(lambda: call(case, given, xp), given, machine)
    for entry in (-1, 2**31 - 1, 0):
        table, lengths = xp.full((2, 9), entry, np.int32), xp.full(2, entry, np.int32)
        out, lse = flashmla_cupy.flash_mla_with_kvcache(
            given.q, given.k_cache, table, lengths, HEAD_DIM_V, is_fp8_kvcache=True, indices=given.indices
        )
        machine.wait()
        if isinstance(first, Errors) or not same_bits(first, (out.view(np.uint16), lse.view(np.uint32))):
            return first if isinstance(first, Errors) else Errors(message=f"entries {entry} change the result")
    return Errors()


def missing_pages(machine: Machine, lengths: tuple[int, ...] = (300, 65, 700, 0, 64)) -> Errors:
    """Without indices, pages within a length that the cache does not have: no keys on a GPU, refused by NumPy."""
    xp, rows = machine.xp, []
    kinds = ((64, "v32", 1, 16), (64, "d512", 3, 128), (48, "v32", 2, 64), (1, "d512", 1, 3))
    for page_size, layout, s_q, h_q in kinds:
        case = Fp8DenseCase(
            lengths, s_q=s_q, h_q=h_q, layout=layout, page_size=page_size, causal=s_q > 1, cache_layout="offset",
            spare_pages=0, seed=21,
        )
        given = fp8_dense_inputs.build(case, xp)
        cache = given.k_cache[:-1]  # the last page can be read, and must not be
        gone, wrong = _gone(given.block_table.shape, len(cache))
        table = xp.where(xp.asarray(gone), xp.asarray(wrong), given.block_table)
        label = f"page {page_size} {layout} s_q {s_q} h_q {h_q}"
        try:
            bits = run_guarded(partial(call_dense, case, given, xp, k_cache=cache, block_table=table), given, machine)
        except ValueError as error:
            if machine.gpu or "block_table" not in str(error):
                return Errors(message=f"{label}: {error}")
            continue
        if isinstance(bits, Errors) or not machine.gpu:
            return bits if isinstance(bits, Errors) else Errors(message=f"{label}: the pages were accepted")
        # The same tokens by indices, where slots beyond the cache are no keys.
        positions = xp.arange(max(lengths))
        slots = table.astype(np.int64)[:, positions // page_size] * page_size + positions % page_size
        unseen = xp.arange(s_q)[::-1] if case.causal else xp.zeros(s_q, np.int64)
        seen = positions < (given.cache_seqlens[:, None] - unseen)[:, :, None]
        attend = partial(reference.attend, given.q, cache, xp.where(seen, slots[:, None], -1), HEAD_DIM_V)
        references = kernel_references(attend, xp, what_is_rounded(False, s_q * h_q, case.d_qk))
        errors = compare(given.out.array, given.lse.array, *references, xp)
        rows.append(errors if errors.message is None else replace(errors, message=f"{label}: {errors.message}"))
    return worst(rows)


def _gone(shape: tuple[int, int], pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Which entries of a block table are overwritten, every third and all of request 1, and int32 with what."""
    place = np.arange(shape[0])[:, None] + np.arange(shape[1])
    wrong = np.asarray((-1, -pages, INT_MIN, pages, INT_MAX, 2147480000), np.int32)
    gone = place % 3 == 1
    gone[1] = True
    return gone, np.random.default_rng(21).choice(wrong, shape)


def stale_metadata(machine: Machine) -> Errors:
    """The plan is a hint: made for another topk, or another batch's lengths, it may balance badly but not be wrong."""
    xp, rows = machine.xp, []
    for h_q, s_q in ((16, 1), (128, 1), (64, 2)):
        for length in ("none", "random", "zero"):
            case = SparseCase(1000, batch=5, s_q=s_q, h_q=h_q, tokens=4096, length=length, extra_topk=100, seed=31)
            given = sparse_inputs.build(case, xp)
            plans = [(f"topk {topk}", plan(case, xp, topk)) for topk in (0, 1, 64, 1001, 1065, 2176, 70000)]
            varied = xp.asarray(np.asarray((65, 4096, 0, 1, 700), np.int32))
            plans.append(("lengths", flashmla_cupy.get_mla_metadata(varied, s_q * h_q, 1, h_q, True)))
            for name, planned in plans:
                given.out.refill(), given.lse.refill()
                call(case, given, xp, planned)
                machine.wait()
                rows.append(check(case, given, machine, f"plan for {name}, topk_length {length}"))
    return worst(rows)


def sink_with_splits(machine: Machine) -> Errors:
    """The sink enters once, after the splits are merged; also where the first split has no key."""
    xp, rows = machine.xp, []
    for parts in (1, 2, 8):
        metadata, num_splits = reference_sched.plan(np.asarray([1472], np.int32), parts, overhead_blocks=1)
        if num_splits[-1] != parts:
            return Errors(message=f"the plan has {num_splits[-1]} splits, expected {parts}")
        first_split = 64 * int(metadata[0, 3])
        for sink, invalid, h_q in ((s, i, h) for s in sparse_cases.SINKS for i in ("none", "head") for h in (16, 128)):
            case = SparseCase(1472, h_q=h_q, tokens=4096, sink=sink, invalid=invalid, seed=12)
            given = sparse_inputs.build(case, xp)
            if invalid == "head" and parts > 1:
                given.indices[..., :first_split] = -1
            call(case, given, xp, (xp.asarray(metadata), xp.asarray(num_splits)))
            machine.wait()
            rows.append(check(case, given, machine, f"{parts} parts, sink {sink}, invalid {invalid}, h_q {h_q}"))
    return worst(rows)


def nothing_to_attend(machine: Machine, launches: int = 1000) -> Errors:
    """Lists without a key as first, middle, last and only row, many times: returns, zeros and -inf."""
    xp = machine.xp
    for batch, empty in ((1, [0]), (3, [0]), (3, [1]), (3, [2]), (3, [0, 1, 2])):
        for h_q in (16, 128):
            case = SparseCase(133, batch=batch, h_q=h_q, length="beyond", seed=33)
            given = sparse_inputs.build(case, xp)
            given.topk_length[...] = 133
            given.topk_length[xp.asarray(empty)] = -5 if h_q == 16 else 0
            if batch == 3 and len(empty) == 3:
                given.topk_length[...], given.indices[...] = 133, -1
            planned = plan(case, xp)
            for _ in range(launches // 10):
                call(case, given, xp, planned)
            machine.wait()
            errors = check(case, given, machine, f"batch {batch}, empty {empty}, h_q {h_q}")
            out, lse = given.out.array[xp.asarray(empty)], given.lse.array[xp.asarray(empty)]
            if errors.message or bool((out.view(np.uint16) != 0).any()) or not bool(xp.isneginf(lse).all()):
                return errors if errors.message else Errors(message=f"batch {batch}: empty rows are not 0 and -inf")
    return Errors()


def graph_contents(machine: Machine) -> Errors:
    """A graph of metadata and decode, captured over empty lists and over full ones, follows what is in the buffers."""
    xp, rows = machine.xp, []
    for h_q, start in ((16, 0), (128, 0), (128, 2048), (64, 2048)):
        case = SparseCase(2048, batch=3, h_q=h_q, s_q=2, tokens=4096, length="beyond", extra_topk=64, seed=41)
        given = sparse_inputs.build(case, xp)
        lists = (given.indices.copy(), given.indices[::-1, :, ::-1].copy(), xp.full_like(given.indices, -1))
        given.topk_length[...] = start
        stream = xp.cuda.Stream(non_blocking=True)
        machine.wait()
        with stream:
            call(case, given, xp)  # loads kernels, fills the memory pool
            stream.synchronize()
            stream.begin_capture()
            call(case, given, xp)
            graph = stream.end_capture()
            for values in ((1, 64, 65), (2048,) * 3, (0, 0, 0), (2048, -1, 17), (start,) * 3):
                for chosen in lists:
                    given.topk_length[...] = xp.asarray(np.asarray(values, np.int32))
                    given.indices[...] = chosen
                    given.out.refill(), given.lse.refill()
                    graph.launch(stream)
                    machine.wait()
                    rows.append(check(case, given, machine, f"captured at {start}, replayed at {values}"))
    return worst(rows)


def repetition(machine: Machine, pdl: bool, iterations: int = 10_000) -> Errors:
    """decode, combine, a user's kernel that reads and wipes the output, again: the same bits every time."""
    xp = machine.xp
    compare_bits = xp.ElementwiseKernel(
        "T expected, T wipe", "T value, raw int32 count",
        "if (value != expected) atomicAdd(&count[0], 1); value = wipe", "flashmla_check_bits",
    )
    cases = (SparseCase(2048, h_q=128, tokens=4096), SparseCase(64, batch=140), SparseCase(700, batch=3, s_q=2))
    with _pdl(pdl):
        for case in cases:
            given = sparse_inputs.build(replace(case, seed=51), xp)
            planned = plan(case, xp)
            call(case, given, xp, planned)
            bits = given.out.array.view(np.uint16)
            right, count = bits.copy(), xp.zeros(1, np.int32)
            for _ in range(iterations // len(cases)):
                call(case, given, xp, planned)
                compare_bits(right, np.uint16(0x7FFF), bits, count)
            machine.wait(60)
            if int(count[0]):
                return Errors(message=f"{case.name}: {int(count[0])} elements changed over the repetitions")
    return Errors()


@contextlib.contextmanager
def _pdl(on: bool) -> Iterator[None]:
    """Kernels read the variable when they are loaded."""
    from flashmla_cupy.ops._plans import clear_plans
    from flashmla_cupy.runtime import compile as runtime_compile
    from flashmla_cupy.runtime import env

    def reload() -> None:
        runtime_compile.forget(), clear_plans()

    with mock.patch.dict(os.environ, {env.DISABLE_PDL.name: "0" if on else "1"}):
        reload()
        try:
            yield
        finally:
            reload()
