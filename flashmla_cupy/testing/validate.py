"""Running checks, collecting the worst errors per kernel, and the evidence record that a unit test guards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmla_cupy.testing import checks, trace
from flashmla_cupy.testing.compare import Errors
from flashmla_cupy.testing.environment import versions
from flashmla_cupy.testing.machine import HangError, Machine

RECORD_FORMAT = 1


@dataclass(frozen=True)
class Result:
    """Outcome of one check. message None: passed. kernels: spec names launched, in order of first launch."""

    op: str
    name: str
    message: str | None
    out_error: float  # worst error over allowed error
    lse_error: float
    kernels: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.message is None


def runnable(ops: Iterable[str], machine: Machine) -> tuple[list[str], list[str]]:
    """(ops that this machine can check now, ops left out because a GPU has experimental kernels alone for them)."""
    from flashmla_cupy.ops._select import all_specs, selectable

    ops = list(ops)
    with_kernel = {spec.op for spec in all_specs() if selectable(spec)}
    left_out = [op for op in ops if machine.gpu and op not in with_kernel]
    return [op for op in ops if op not in left_out], left_out


def run(
    rows: Iterable[checks.Check], machine: Machine, on_result: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Runs every check; an exception is a failure of that check, a lost GPU fails all that follow at once.

    Raises HangError when a kernel does not return.
    """
    results: list[Result] = []
    lost = False
    for row in rows:
        if lost:
            result = Result(row.op, row.name, "not run: an earlier check lost the GPU", 0.0, 0.0, (), 0.0)
        else:
            result = _run_one(row)
            lost = not result.passed and not machine.healthy()
        results.append(result)
        on_result(result)
    return results


def _run_one(row: checks.Check) -> Result:
    started = time.perf_counter()
    names: list[str] = []
    try:
        with trace.launches() as names:
            errors = row.run()
    except HangError as error:
        raise HangError(f"{row.op}: {row.name}: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever a kernel or the library raises is this check's failure
        errors = Errors(message=f"{type(error).__name__}: {_first_line(error)}")
    return Result(
        row.op,
        row.name,
        errors.message,
        float(errors.out),
        float(errors.lse),
        tuple(dict.fromkeys(names)),
        time.perf_counter() - started,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def by_kernel(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Per kernel name: cases run, failures, worst errors as fractions of what is allowed."""
    table: dict[str, dict[str, Any]] = {}
    for result in results:
        for name in result.kernels:
            row = table.setdefault(name, {"cases": 0, "failed": 0, "worst_out": 0.0, "worst_lse": 0.0})
            row["cases"] += 1
            row["failed"] += not result.passed
            row["worst_out"] = max(row["worst_out"], result.out_error)
            row["worst_lse"] = max(row["worst_lse"], result.lse_error)
    return dict(sorted(table.items()))


def record(results: list[Result], suite: str, machine: Machine) -> dict[str, Any]:
    """The evidence of one run on a GPU: what ran, on which source text, with which tools."""
    from flashmla_cupy.ops._select import all_specs
    from flashmla_cupy.runtime.source import evidence_digest

    specs = {spec.name: spec for spec in all_specs() if not spec.experimental}
    kernels = {
        name: {"evidence_digest": evidence_digest(specs[name]), **row}
        for name, row in by_kernel(results).items()
        if name in specs
    }
    return {
        "format": RECORD_FORMAT,
        "suite": suite,
        **versions(machine),
        "checks": len(results),
        "failed": sum(not result.passed for result in results),
        "kernels": kernels,
    }


def stale_kernels(folder: Path, nvrtc_major: int) -> dict[str, str]:
    """Kernel name -> what is wrong, for each selectable kernel that no record in `folder` vouches for, as an NVRTC of
    this major version compiles it.
    """
    from flashmla_cupy.ops._select import all_specs
    from flashmla_cupy.runtime.source import evidence_digest

    recorded: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("validate_*.json")):
        evidence = json.loads(file.read_text(encoding="utf-8"))
        if evidence["nvrtc"].partition(".")[0] == str(nvrtc_major):
            for name, row in evidence["kernels"].items():
                recorded.setdefault(name, []).append(row)
    wrong = {}
    for spec in all_specs():
        if spec.experimental:
            continue
        rows = recorded.get(spec.name)
        if not rows:
            wrong[spec.name] = "no record"
        elif not any(
            row["evidence_digest"] == evidence_digest(spec) and row["cases"] and not row["failed"] for row in rows
        ):
            failed = any(row["evidence_digest"] == evidence_digest(spec) for row in rows)
            wrong[spec.name] = "its record has failures" if failed else "source changed since its record"
    return wrong


def results_json(results: list[Result], suite: str, machine: Machine) -> dict[str, Any]:
    """Every check, for --json."""
    passed = sum(result.passed for result in results)
    return {
        "suite": suite,
        **versions(machine),
        "summary": {"checks": len(results), "passed": passed, "failed": len(results) - passed},
        "by_kernel": by_kernel(results),
        "checks": [{**vars(result), "passed": result.passed, "kernels": list(result.kernels)} for result in results],
    }
