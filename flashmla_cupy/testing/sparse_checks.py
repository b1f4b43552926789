"""What `validate` runs for the sparse decode over an FP8 cache, case by case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.reference import sparse_decode as reference
from flashmla_cupy.testing import plain_sparse, sparse_cases, sparse_inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.guarded import run_guarded, same_bits
from flashmla_cupy.testing.machine import Machine
from flashmla_cupy.testing.sparse_cases import SparseCase
from flashmla_cupy.testing.sparse_inputs import SparseInputs

_PLAIN_SCORES_LIMIT, _PLAIN_KEYS_LIMIT = 40_000, 2_000  # of the row-by-row check of the NumPy backend


def collect(suite: str, machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of the cases of a suite that this machine can run."""
    rows = sparse_cases.suite(suite)
    if not machine.gpu:
        rows = [
            case
            for case in rows
            if case.scores <= _PLAIN_SCORES_LIMIT and case.keys <= _PLAIN_KEYS_LIMIT and case.batch <= 40
        ]
    return [(case.name, partial(sparse, case)) for case in rows]


# ---- one call


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


def expected(case: SparseCase, given: SparseInputs, machine: Machine) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(exact, rounded) for `compare`, each (out, lse) in float64.

    A kernel on 16-bit tensor cores multiplies keys that were rounded to bfloat16. Its output is measured against the
    exact keys, with the rounding reference's own error as the budget; its lse against the lse of the rounded keys,
    which the budget of an lse (float32 accumulation) is meant for. The NumPy backend rounds no key.
    """
    shared = dict(softmax_scale=case.softmax_scale, **given.keywords())
    indices = shared.pop("indices")
    rounded = reference.attend(given.q, given.k_cache, indices, HEAD_DIM_V, mode="rounded", xp=machine.xp, **shared)
    if not machine.gpu:
        shared["softmax_scale"] = case.d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
        return plain_sparse.attend(given.q, given.k_cache, indices, HEAD_DIM_V, **shared), rounded
    out, _ = reference.attend(given.q, given.k_cache, indices, HEAD_DIM_V, mode="exact", xp=machine.xp, **shared)
    return (out, rounded[1]), rounded


def sparse(case: SparseCase, machine: Machine) -> Errors:
    """Kernel first, then the reference; guard bands; the same bits again; the same bits under other hostile content."""
    xp = machine.xp
    given = sparse_inputs.build(case, xp)
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
            other_given = sparse_inputs.build(variant, xp)
            other = run_guarded(lambda v=variant, g=other_given: call(v, g, xp), other_given, machine)
            if isinstance(other, Errors):
                return other
            if not same_bits(first, other):
                what = f"poison={variant.poison} invalid={variant.invalid_value} kv={variant.cache_layout}"
                return Errors(errors.out, errors.lse, f"bits change with content that must not matter ({what})")
    return errors


def check(case: SparseCase, given: SparseInputs, machine: Machine, label: str) -> Errors:
    """What the last call wrote, against the references; `label` begins the message."""
    errors = compare(given.out.array, given.lse.array, *expected(case, given, machine), machine.xp)
    return errors if errors.message is None else replace(errors, message=f"{label}: {errors.message}")
