"""What `validate` runs for sparse prefill, case by case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.reference import sparse_prefill as reference
from flashmla_cupy.testing import plain_prefill, prefill_cases, prefill_inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V
from flashmla_cupy.testing.compare import Errors, compare
from flashmla_cupy.testing.guarded import same_bits
from flashmla_cupy.testing.machine import Machine
from flashmla_cupy.testing.prefill_cases import PrefillCase
from flashmla_cupy.testing.prefill_inputs import PrefillInputs

# Of the row-by-row check of the NumPy backend.
_PLAIN_SCORES_LIMIT, _PLAIN_KEYS_LIMIT, _PLAIN_ROWS_LIMIT = 40_000, 2_000, 5_000

Results = tuple[Any, Any, Any]  # out, max_logits, lse


def collect(suite: str, machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of the cases of a suite that this machine can run."""
    rows = prefill_cases.suite(suite)
    if not machine.gpu:
        rows = [case for case in rows if case.scores <= _PLAIN_SCORES_LIMIT and case.keys <= _PLAIN_KEYS_LIMIT
                and case.s_kv <= _PLAIN_ROWS_LIMIT]
    return [(case.name, partial(prefill, case)) for case in rows]


def call(case: PrefillCase, given: PrefillInputs, **changes: Any) -> Results:
    """The call of a user, with out=, max_logits= and lse=."""
    arrays = {name: getattr(given, name) for name in ("q", "kv", "indices")}
    written = {name: guarded.array for name, guarded in given.outputs.items()}
    keywords = {**arrays, **given.keywords(), **written, "sm_scale": case.scale, "d_v": HEAD_DIM_V, **changes}
    return flashmla_cupy.flash_mla_sparse_fwd(**keywords)


def run_guarded(run: Callable[[], Results], given: PrefillInputs, machine: Machine) -> Results | Errors:
    """The bits of the three results after `run`, or what is wrong with where it wrote."""
    results = run()
    machine.wait()
    for (name, guarded), result in zip(given.outputs.items(), results, strict=True):
        if not guarded.outside_untouched():
            return Errors(message=f"{name}: elements outside the view were written")
        if tuple(result.shape) != tuple(guarded.array.shape):
            return Errors(message=f"{name}: returned shape {result.shape}, expected {guarded.array.shape}")
    return tuple(
        guarded.array.view(np.uint16 if name == "out" else np.uint32).copy() for name, guarded in given.outputs.items()
    )


def expected(case: PrefillCase, given: PrefillInputs, machine: Machine) -> tuple[Results, Results]:
    """The results of the exact and of the rounding reference, float64."""
    attend = partial(reference.attend, given.q, given.kv, given.indices, case.scale, HEAD_DIM_V, **given.keywords())
    rounded = attend(mode="rounded", round_output=False, xp=machine.xp)
    if machine.gpu:
        return attend(xp=machine.xp), rounded
    plain = plain_prefill.attend(given.q, given.kv, given.indices, case.scale, HEAD_DIM_V, **given.keywords())
    return plain, rounded


def compare_all(got: Results, exact: Results, rounded: Results, xp: Any) -> Errors:
    """Each query token by itself. The error of max_logits counts as one of lse."""
    rows = []
    for name, which in (("lse", 2), ("max_logits", 1)):
        references = [(x[0][:, None], x[which][..., None]) for x in (exact, rounded)]
        errors = compare(got[0][:, None], got[which][..., None], *references, xp)
        if errors.message is not None:
            return replace(errors, message=errors.message.replace("lse:", f"{name}:").replace("request", "token"))
        rows.append(errors)
    return Errors(rows[0].out, max(errors.lse for errors in rows))


def check(case: PrefillCase, given: PrefillInputs, machine: Machine, label: str = "") -> Errors:
    """What the last call wrote, against the references; `label` begins the message."""
    got = tuple(guarded.array for guarded in given.outputs.values())
    errors = compare_all(got, *expected(case, given, machine), machine.xp)
    return errors if errors.message is None or not label else replace(errors, message=f"{label}: {errors.message}")


def prefill(case: PrefillCase, machine: Machine) -> Errors:
    """Kernel first, then the reference; guard bands; the same bits again; the same bits under other hostile content."""
    given = prefill_inputs.build(case, machine.xp)
    first = run_guarded(partial(call, case, given), given, machine)
    if isinstance(first, Errors):
        return first
    for guarded in given.outputs.values():
        guarded.refill()
    again = run_guarded(partial(call, case, given), given, machine)
    if isinstance(again, Errors):
        return again
    if not same_bits(first, again):
        return Errors(message="two calls with the same input differ")
    errors = check(case, given, machine)
    for variant in case.variants() if case.unchanged and errors.message is None else ():
        other = prefill_inputs.build(variant, machine.xp)
        bits = run_guarded(partial(call, variant, other), other, machine)
        if isinstance(bits, Errors):
            return bits
        if not same_bits(first, bits):
            changed = [x.name for x in fields(case) if getattr(variant, x.name) != getattr(case, x.name)]
            what = " ".join(f"{name}={getattr(variant, name)}" for name in changed)
            return Errors(errors.out, errors.lse, f"bits change with content that must not matter ({what})")
    return errors
