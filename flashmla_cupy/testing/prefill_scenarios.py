"""Sparse prefill checks that are more than one call: many tokens, far rows, merging, graphs, repetition, arguments.

Each function takes the machine (and sizes that the tests may lower) and returns the worst errors it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.reference import sparse_prefill as reference
from flashmla_cupy.testing import inputs, prefill_inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V, YARN_SCALE
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.guarded import refuses, same_bits
from flashmla_cupy.testing.machine import Machine
from flashmla_cupy.testing.prefill_cases import PrefillCase
from flashmla_cupy.testing.prefill_checks import call, check, compare_all, expected, run_guarded
from flashmla_cupy.testing.scenarios import worst
from flashmla_cupy.testing.sparse_cases import INT_MIN

_FAR_ROWS = 7_500_000  # of 1152 bytes: half of them lie beyond 2^32 bytes, a quarter below 2^31


def collect(suite: str, machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of what this machine can run; none in the smoke suite."""
    if suite == "smoke":
        return []
    rows: list[tuple[str, Callable[[Machine], Errors]]] = [
        ("list cut in two and merged equals one run", merge_halves),
        ("wrong arguments are refused", arguments),
        ("odd arguments: the same bits or refused", odd_arguments),
        ("offsets that make no sense: no fault", odd_offsets),
    ]
    if machine.gpu:
        rows += [(f"{s_q} query tokens", partial(many_tokens, s_q=s_q)) for s_q in (65535, 65536, 65537)]
        rows += [
            ("1,000 launches without a key", nothing_to_attend),
            ("graph follows indices and lengths changed in place", graph_contents),
            ("1,000 repetitions", repetition),
        ]
        if machine.xp.cuda.runtime.memGetInfo()[0] > 1.2 * _FAR_ROWS * 1152:
            rows.append(("rows beyond 2^31 and 2^32 bytes", far_rows))
    return rows


def many_tokens(machine: Machine, s_q: int) -> Errors:
    """More query tokens than a grid has rows in y and z: every one is written, and the first and last are right."""
    xp = machine.xp
    case = PrefillCase(s_q, 64, h_q=8, s_kv=4096, invalid="random", seed=13)
    given = prefill_inputs.build(case, xp)
    bits = run_guarded(partial(call, case, given), given, machine)
    if isinstance(bits, Errors):
        return bits
    got = tuple(guarded.array for guarded in given.outputs.values())
    rows = []
    for part in (slice(0, 500), slice(s_q // 2 - 250, s_q // 2 + 250), slice(s_q - 500, s_q)):
        attend = partial(reference.attend, given.q[part], given.kv, given.indices[part], case.scale, HEAD_DIM_V, xp=xp)
        references = attend(), attend(mode="rounded", round_output=False)
        rows.append(compare_all(tuple(x[part] for x in got), *references, xp))
    if bool(xp.isnan(got[2]).any()) or bool(xp.isnan(got[0].astype(np.float32)).any()):
        rows.append(Errors(message="query tokens were left unwritten"))
    machine.free()
    return worst(rows)


def far_rows(machine: Machine, s_kv: int = _FAR_ROWS) -> Errors:
    """Rows far into a large kv give the bits of the same rows at its start."""
    xp = machine.xp
    places = np.asarray((0, s_kv // 4, s_kv // 2, s_kv - 64))
    kv = xp.full((s_kv, 1, 576), 0x7FC0, np.uint16)
    near = inputs.random_bits(xp, "bfloat16", (64 * len(places), 1, 576), 3)
    for i, place in enumerate(places.tolist()):
        kv[place : place + 64] = near[64 * i : 64 * i + 64]
    chosen = np.random.default_rng(4).integers(0, 64 * len(places), (5, 1, 700))
    far = places[chosen // 64] + chosen % 64
    message = None
    for h_q in (16, 128):
        q = inputs.random_array(xp, "bfloat16", (5, h_q, 576), seed=4)
        outs = [flashmla_cupy.flash_mla_sparse_fwd(
            q, array.view(q.dtype), xp.asarray(rows.astype(np.int32)), 576**-0.5
        )[0].view(np.uint16) for array, rows in ((near, chosen), (kv, far))]
        machine.wait()
        if not bool((outs[0] == outs[1]).all()):
            message = f"h_q {h_q}: rows from {places.tolist()} differ from the same data at the start"
    kv = outs = None
    machine.free()
    return Errors(message=message)


def merge_halves(machine: Machine) -> Errors:
    """A list cut in two, each half attended to, merged with merge_states: what one run over all of it gives."""
    xp, rows = machine.xp, []
    topk = 640 if machine.gpu else 100
    for scale in (0.01, 1.0, YARN_SCALE):
        case = PrefillCase(3, topk, h_q=16, softmax_scale=scale, q_gain=0.5, invalid="random", seed=61)
        given = prefill_inputs.build(case, xp)
        none = dict.fromkeys(given.outputs)
        parts = [call(case, given, indices=half, **none)
                 for half in (given.indices[..., : topk // 3], given.indices[..., topk // 3 :])]
        out, lse = flashmla_cupy.merge_states(xp.stack([p[0] for p in parts]), xp.stack([p[2] for p in parts]))
        machine.wait()
        exact, rounded = expected(case, given, machine)
        # Both halves and the merged result are rounded: three roundings where one run has one.
        twice = exact[0] + 2.0 * (rounded[0] - exact[0])
        if not machine.gpu:
            twice = exact[0] + 2.0 * (exact[0].astype(np.float32).astype(out.dtype).astype(np.float64) - exact[0])
        rows.append(compare(out[:, None], lse[..., None], (exact[0][:, None], exact[2][..., None]),
                            (twice[:, None], exact[2][..., None]), xp))
    return worst(rows)


def arguments(machine: Machine) -> Errors:
    """A wrong dtype, shape, or missing argument raises before any launch, with a message that names it."""
    xp = machine.xp
    case = PrefillCase(6, 70, h_q=16, requests="some", sink="mixed", length="random", seed=71)
    given = prefill_inputs.build(case, xp)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": given.q.astype(np.float32)}),
        ("q", {"q": given.q[0]}),
        ("q", {"q": given.q[..., :300]}),
        ("kv", {"kv": given.kv[:, 0]}),
        ("kv", {"kv": given.kv[..., :512]}),
        ("kv", {"kv": given.kv.view(np.float16)}),
        ("indices", {"indices": given.indices[..., :0]}),
        ("indices", {"indices": given.indices[:1]}),
        ("indices", {"indices": given.indices.astype(np.float32)}),
        ("indices", {"indices": None}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("sm_scale", {"sm_scale": "1"}),
        ("d_v", {"d_v": 576}),
        ("attn_sink", {"attn_sink": given.attn_sink[:-1]}),
        ("topk_length", {"topk_length": given.topk_length[:1]}),
        ("cu_seqlens_q", {"cu_seqlens_q": None}),
        ("cu_seqlens_kv", {"cu_seqlens_kv": None}),
        ("cu_seqlens_kv", {"cu_seqlens_kv": given.cu_seqlens_kv[1:]}),
        ("out", {"out": xp.zeros((6, 16, 512), np.float32)}),
        ("max_logits", {"max_logits": xp.zeros((16, 6), np.float32)}),
        ("lse", {"lse": xp.zeros((6, 15), np.float32)}),
        ("lse", {"lse": given.max_logits.array}),
    ]
    return refuses(partial(call, case, given), wrong, machine)


def odd_arguments(machine: Machine) -> Errors:
    """int64, strided, Fortran-order and host integers, 2-axis indices, unaligned rows: the same bits, or refused."""
    xp = machine.xp
    case = PrefillCase(6, 70, h_q=16, length="random", invalid="random", requests="some", seed=81)
    given = prefill_inputs.build(case, xp)
    expected_bits = run_guarded(partial(call, case, given), given, machine)
    if isinstance(expected_bits, Errors):
        return expected_bits
    indices, lengths, offsets = given.indices, given.topk_length, given.cu_seqlens_q
    wide, twice = xp.full((6, 1, 140), -7, np.int32), xp.zeros(12, np.int32)
    more = xp.zeros(2 * len(offsets), np.int32)
    wide[..., ::2], twice[::2], more[::2] = indices, lengths, offsets
    odd: list[tuple[str, dict[str, Any]]] = [
        ("int64 indices", {"indices": indices.astype(np.int64)}),
        ("indices[..., ::2]", {"indices": wide[..., ::2]}),
        ("Fortran order indices", {"indices": xp.asfortranarray(indices)}),
        ("2-axis indices", {"indices": indices[:, 0]}),
        ("lengths[::2]", {"topk_length": twice[::2]}),
        ("int64 lengths", {"topk_length": lengths.astype(np.int64)}),
        ("lengths on the host", {"topk_length": lengths.get() if machine.gpu else lengths.tolist()}),
        ("cu_seqlens_q[::2]", {"cu_seqlens_q": more[::2]}),
        ("int64 offsets", {"cu_seqlens_kv": given.cu_seqlens_kv.astype(np.int64)}),
        ("Fortran order q", {"q": xp.asfortranarray(given.q.view(np.uint16)).view(given.q.dtype)}),
        ("2-byte aligned q", {"q": _misaligned(xp, given.q)}),
        ("2-byte aligned kv", {"kv": _misaligned(xp, given.kv)}),
        ("Fortran order kv", {"kv": xp.asfortranarray(given.kv.view(np.uint16)).view(given.kv.dtype)}),
    ]
    for name, change in odd:
        for guarded in given.outputs.values():
            guarded.refill()
        try:
            bits = run_guarded(partial(call, case, given, **change), given, machine)
        except (TypeError, ValueError, flashmla_cupy.FlashMLAError):
            continue
        if isinstance(bits, Errors):
            return replace(bits, message=f"{name}: {bits.message}")
        if not same_bits(bits, expected_bits):
            return Errors(message=f"{name}: bits differ from those of plain arguments")
    call(case, given)  # the last odd one may have been refused
    machine.wait()
    return check(case, given, machine, "plain arguments")


def _misaligned(xp: Any, x: Any) -> Any:
    buffer = xp.zeros(x.size + 1, np.uint16)
    buffer[1:] = x.view(np.uint16).reshape(-1)
    return buffer[1:].reshape(x.shape).view(x.dtype)


def odd_offsets(machine: Machine) -> Errors:
    """Offsets that decrease, begin below 0 or end beyond the arrays: refused on the host; on a GPU no fault, and every
    row is written."""
    xp = machine.xp
    case = PrefillCase(20, 100, h_q=16, invalid="random", seed=91)
    for cu_q, cu_kv in (((-5, 10, 400), (-7, 100, 2**31 - 1)), ((0, 15, 5, 20), (0, 200, 100, 300)),
                        ((2**31 - 1, INT_MIN), (2**31 - 1, INT_MIN)), ((0,), (0,)), ((0, 20), (300, 300))):
        given = prefill_inputs.build(case, xp)
        given.kv[...] = inputs.random_array(xp, "bfloat16", given.kv.shape, 5)
        offsets = {name: xp.asarray(np.asarray(values, np.int32))
                   for name, values in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv))}
        try:
            bits = run_guarded(partial(call, case, given, **offsets), given, machine)
        except ValueError as error:
            if machine.gpu or not str(error).startswith("cu_seqlens_"):
                raise
            continue
        if isinstance(bits, Errors):
            return bits
        if not bool(xp.isfinite(given.out.array.astype(np.float32)).all()) or bool(xp.isnan(given.lse.array).any()):
            return Errors(message=f"offsets {cu_q} and {cu_kv}: results are not finite")
    return Errors()


def nothing_to_attend(machine: Machine, launches: int = 1000) -> Errors:
    """Lists without a key as first, middle, last and only one, many times: returns, zeros and -inf."""
    xp = machine.xp
    for s_q, empty in ((1, [0]), (3, [0]), (3, [1]), (3, [2]), (400, [0, 131, 132, 263, 399])):
        for h_q in (16, 128):
            case = PrefillCase(s_q, 133, h_q=h_q, length="beyond", seed=33)
            given = prefill_inputs.build(case, xp)
            given.topk_length[...] = 133
            given.topk_length[xp.asarray(empty)] = -5 if h_q == 16 else 0
            for _ in range(launches // 10):
                call(case, given)
            machine.wait()
            errors = check(case, given, machine, f"s_q {s_q}, empty {empty}, h_q {h_q}")
            out, lse = given.out.array[xp.asarray(empty)], given.lse.array[xp.asarray(empty)]
            if errors.message or bool((out.view(np.uint16) != 0).any()) or not bool(xp.isneginf(lse).all()):
                return errors if errors.message else Errors(message=f"s_q {s_q}: empty rows are not 0 and -inf")
    return Errors()


def graph_contents(machine: Machine) -> Errors:
    """A captured call follows what is in the buffers at each replay."""
    xp, rows = machine.xp, []
    for h_q, start in ((16, 0), (128, 0), (128, 2048)):
        case = PrefillCase(5, 2048, h_q=h_q, s_kv=4096, length="beyond", seed=41)
        given = prefill_inputs.build(case, xp)
        lists = (given.indices.copy(), given.indices[::-1, :, ::-1].copy(), xp.full_like(given.indices, -1))
        given.topk_length[...] = start
        stream = xp.cuda.Stream(non_blocking=True)
        machine.wait()
        with stream:
            call(case, given)  # loads the kernel
            stream.synchronize()
            stream.begin_capture()
            call(case, given)
            graph = stream.end_capture()
            for values in ((1, 64, 65, 0, 2048), (2048,) * 5, (0,) * 5, (start,) * 5):
                for chosen in lists:
                    given.topk_length[...] = xp.asarray(np.asarray(values, np.int32))
                    given.indices[...] = chosen
                    for guarded in given.outputs.values():
                        guarded.refill()
                    graph.launch(stream)
                    machine.wait()
                    rows.append(check(case, given, machine, f"captured at {start}, replayed at {values}"))
    return worst(rows)


def repetition(machine: Machine, iterations: int = 1000) -> Errors:
    """The call, a user's kernel that reads and wipes the output, again: the same bits every time."""
    xp = machine.xp
    compare_bits = xp.ElementwiseKernel(
        "T expected, T wipe", "T value, raw int32 count",
        "if (value != expected) atomicAdd(&count[0], 1); value = wipe", "flashmla_check_bits",
    )
    for case in (PrefillCase(300, 512, h_q=128, s_kv=4096), PrefillCase(700, 100, h_q=16, length="random")):
        given = prefill_inputs.build(replace(case, seed=51), xp)
        call(case, given)
        bits = given.out.array.view(np.uint16)
        right, count = bits.copy(), xp.zeros(1, np.int32)
        for _ in range(iterations // 2):
            call(case, given)
            compare_bits(right, np.uint16(0x7FFF), bits, count)
        machine.wait(60)
        if int(count[0]):
            return Errors(message=f"{case.name}: {int(count[0])} elements changed over the repetitions")
    return Errors()
