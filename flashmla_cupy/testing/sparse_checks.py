"""What `validate` runs for the decode over an FP8 cache, case by case: by indices (sparse) and without (dense)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.ops.sparse_decode import what_is_rounded, with_codes
from flashmla_cupy.reference import sparse_decode as reference
from flashmla_cupy.testing import fp8_dense_cases, fp8_dense_inputs, plain, plain_sparse, sparse_cases, sparse_inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.fp8_dense_cases import Fp8DenseCase
from flashmla_cupy.testing.guarded import run_guarded, same_bits
from flashmla_cupy.testing.inputs import Inputs
from flashmla_cupy.testing.machine import Machine
from flashmla_cupy.testing.sparse_cases import SparseCase
from flashmla_cupy.testing.sparse_inputs import SparseInputs

# Of the row-by-row check of the NumPy backend; without indices the rows share their keys.
_PLAIN_SCORES_LIMIT, _PLAIN_DENSE_SCORES_LIMIT, _PLAIN_KEYS_LIMIT = 40_000, 200_000, 2_000

References = tuple[tuple[Any, Any], tuple[Any, Any]]
Check = tuple[str, Callable[[Machine], Errors]]


def collect(suite: str, machine: Machine) -> list[Check]:
    """(name, check) of the cases of a suite that this machine can run."""
    rows, dense_rows = sparse_cases.suite(suite), fp8_dense_cases.suite(suite)
    if not machine.gpu:
        rows = _small(rows, _PLAIN_SCORES_LIMIT)
        dense_rows = _small(dense_rows, _PLAIN_DENSE_SCORES_LIMIT)
    checks = [(case.name, partial(sparse, case)) for case in rows]
    checks += [(case.name, partial(dense, case)) for case in dense_rows]
    return [(name, partial(on_kernel, check, i % 2 == 0)) for i, (name, check) in enumerate(checks)]


def on_kernel(check: Callable[[Machine], Errors], codes: bool, machine: Machine) -> Errors:
    """With `codes`, calls get the kernel that multiplies codes wherever it can serve them; without, the one that they
    would get where it has too little to do to be faster."""
    with with_codes(codes) if machine.gpu else contextlib.nullcontext():
        return check(machine)


def _small(rows: tuple[Any, ...], scores: int) -> list[Any]:
    return [case for case in rows if case.scores <= scores and case.keys <= _PLAIN_KEYS_LIMIT and case.batch <= 40]


# ---- one call with indices


def plan(case: SparseCase, xp: Any, topk: int | None = None) -> tuple[Any, Any]:
    return flashmla_cupy.get_mla_metadata(
        xp.zeros(case.batch, np.int32), case.s_q * case.h_q, 1, case.h_q, True,
        case.planned_topk if topk is None else topk,
    )


def call(case: SparseCase, given: SparseInputs, xp: Any, planned: tuple[Any, Any] | None = None, **changes: Any) -> Any:
    """The call of a user, with out= and lse=. planned: metadata instead of what the case says."""
    if planned is None:
        planned = plan(case, xp) if case.with_metadata else (None, None)
    keywords = {**given.keywords(), "out": given.out.array, "lse": given.lse.array, "q": given.q, **changes}
    return flashmla_cupy.flash_mla_with_kvcache(
        keywords.pop("q"), given.k_cache, None, None, HEAD_DIM_V, *planned, False, True, keywords.pop("indices"),
        softmax_scale=case.softmax_scale, **keywords,
    )


def expected(case: SparseCase, given: SparseInputs, machine: Machine) -> References:
    """(exact, rounded) for `compare`, each (out, lse) in float64."""
    keywords = given.keywords()
    arrays = given.q, given.k_cache, keywords.pop("indices")
    attend = partial(reference.attend, *arrays, HEAD_DIM_V, softmax_scale=case.softmax_scale, **keywords)
    if machine.gpu:
        return kernel_references(attend, machine.xp, what_is_rounded(True, case.h_q, case.d_qk))
    exact = plain_sparse.attend(*arrays, HEAD_DIM_V, _scale(case), **keywords)
    return exact, (attend(mode="rounded")[0], exact[1])


def kernel_references(attend: Callable[..., tuple[Any, Any]], xp: Any, rounds: str) -> References:
    """(exact, rounded) for `compare` of a kernel. attend(mode=, round_output=, xp=): a reference over an FP8 cache.

    Its output is measured against the exact keys, with the error of the reference that rounds keys to bfloat16 as the
    budget. rounds: what_is_rounded. Where keys are, the lse is held to that of the rounded keys, and where nothing is,
    as on the NumPy backend, to the exact one, both as close as float32 accumulation; where scores are, its budget is
    the error of rounding them so.
    """
    exact, rounded = attend(mode="exact", xp=xp), attend(mode="rounded", round_output=False, xp=xp)
    if rounds == "keys":
        return (exact[0], rounded[1]), rounded
    return exact, (rounded[0], exact[1] if rounds == "nothing" else attend(mode="rounded scores", xp=xp)[1])


def _scale(case: SparseCase | Fp8DenseCase) -> float:
    return case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale


def sparse(case: SparseCase, machine: Machine) -> Errors:
    """A call with indices, right and hostile; see _checked."""
    return _checked(case, machine, sparse_inputs.build, call, expected)


def _checked(case: Any, machine: Machine, build: Callable, call: Callable, expected: Callable) -> Errors:
    """Kernel first, then the reference; guard bands; the same bits again; the same bits under other hostile content."""
    xp = machine.xp
    given = build(case, xp)
    first = run_guarded(lambda: call(case, given, xp), given, machine)
    if isinstance(first, Errors):
        return first
    given.out.refill(), given.lse.refill()
    again = run_guarded(lambda: call(case, given, xp), given, machine)
    if isinstance(again, Errors):
        return again
    if not same_bits(first, again):
        return Errors(message="two calls with the same input differ")
    errors = compare(given.out.array, given.lse.array, *expected(case, given, machine), xp)
    if errors.message is None and case.unchanged:
        for variant in case.variants():
            other_given = build(variant, xp)
            other = run_guarded(lambda v=variant, g=other_given: call(v, g, xp), other_given, machine)
            if isinstance(other, Errors):
                return other
            if not same_bits(first, other):
                changed = [x.name for x in fields(case) if getattr(variant, x.name) != getattr(case, x.name)]
                what = " ".join(f"{name}={getattr(variant, name)}" for name in changed)
                return Errors(errors.out, errors.lse, f"bits change with content that must not matter ({what})")
    return errors


def check(case: SparseCase, given: SparseInputs, machine: Machine, label: str) -> Errors:
    """What the last call wrote, against the references; `label` begins the message."""
    errors = compare(given.out.array, given.lse.array, *expected(case, given, machine), machine.xp)
    return errors if errors.message is None else replace(errors, message=f"{label}: {errors.message}")


# ---- one call without indices


def call_dense(case: Fp8DenseCase, given: Inputs, xp: Any, **changes: Any) -> tuple[Any, Any]:
    """The call of a user, with out= and lse=."""
    planned = (None, None)
    if case.with_metadata:
        planned = flashmla_cupy.get_mla_metadata(given.cache_seqlens, case.s_q * case.h_q, 1, case.h_q, True, None)
    arrays = {name: getattr(given, name) for name in ("q", "k_cache", "block_table", "cache_seqlens")} | changes
    return flashmla_cupy.flash_mla_with_kvcache(
        *arrays.values(), HEAD_DIM_V, *planned, case.causal, True, None, softmax_scale=case.softmax_scale,
        out=given.out.array, lse=given.lse.array,
    )


def expected_dense(case: Fp8DenseCase, given: Inputs, machine: Machine) -> References:
    """(exact, rounded) for `compare`, each (out, lse) in float64."""
    attend = partial(
        reference.attend_paged, given.q, given.k_cache, given.block_table, given.cache_seqlens, HEAD_DIM_V,
        softmax_scale=case.softmax_scale, causal=case.causal,
    )
    if machine.gpu:
        return kernel_references(attend, machine.xp, what_is_rounded(False, case.s_q * case.h_q, case.d_qk))
    keys = plain_sparse.keys_of_requests(given.k_cache, given.block_table, case.lengths, case.d_qk)
    exact = plain.attend(given.q, keys, None, case.lengths, HEAD_DIM_V, _scale(case), case.causal)
    return exact, (attend(mode="rounded")[0], exact[1])


def dense(case: Fp8DenseCase, machine: Machine) -> Errors:
    """A call without indices, right and hostile; see _checked."""
    return _checked(case, machine, fp8_dense_inputs.build, call_dense, expected_dense)
