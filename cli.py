"""Command line of flashmla_cupy: `python cli.py ...` in a checkout, `flashmla-cupy ...` where it is installed.

Parsing and printing only; the work is in flashmla_cupy.testing and flashmla_cupy.runtime.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape

import flashmla_cupy
from flashmla_cupy.testing.schedule import MAX_INT32, MAX_REQUESTS
from flashmla_cupy.testing.terminal import Architecture, Group, OutputFile, OutputFolder, console, progress, write_json

SHOWN_FAILURES = 20
FILE, PNG = OutputFile(), OutputFile(png=True)


def allow_experimental(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from flashmla_cupy.ops import _select

        ctx.with_resource(_select.experimental_kernels())


EXPERIMENTAL = click.option("--experimental", is_flag=True, expose_value=False, callback=allow_experimental,
                            help="Also kernels that have no passing record of a GPU validation yet.")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flashmla_cupy.__version__, message="flashmla_cupy %(version)s")
def cli() -> None:
    """MLA attention kernels for CuPy: check them, time them, look into them."""


# ---- validate


@cli.command()
@click.option(
    "--op",
    "ops",
    multiple=True,
    callback=lambda context, option, ops: tuple(dict.fromkeys(ops)),
    type=click.Choice(["sched_meta", "combine", "dense_decode", "kv_quant", "sparse_decode", "sparse_prefill"]),
    help="Only this op; may be repeated.",
)
@click.option("--suite", type=click.Choice(["smoke", "corner", "full"]), default="smoke", show_default=True)
@click.option("--record", type=FILE, help="Write the evidence record of this GPU run (tests/records/validate_*.json).")
@click.option("--json", "json_path", type=FILE, help="Write every check's outcome.")
@click.option("--numpy", "force_numpy", is_flag=True, help="Check the NumPy backend even if there is a GPU.")
@EXPERIMENTAL
def validate(ops: tuple[str, ...], suite: str, record: Path | None, json_path: Path | None, force_numpy: bool) -> None:
    """Run the kernels on hostile inputs and compare them with float64 references.

    Without a GPU: the NumPy backend against an independent check, and every kernel compiled.
    """
    from flashmla_cupy.runtime import env as variables
    from flashmla_cupy.testing import checks, report
    from flashmla_cupy.testing import kernels as variants
    from flashmla_cupy.testing import machine as machines
    from flashmla_cupy.testing import validate as validation

    variables.check()
    out, machine = console(), machines.detect(force_numpy)
    if record is not None and not machine.gpu:
        raise click.ClickException("record: no GPU was found, and a record vouches for a GPU run")
    if machine.gpu:
        out.print(f"[bold]{escape(machine.name)}[/], suite {suite}")
    else:
        compiled = f"the kernels of {', '.join(ops)}" if ops else "every kernel"
        out.print(
            f"[bold yellow]{'No GPU was found' if not force_numpy else 'The GPU is not used'}:[/] checking the NumPy "
            f"backend on the small cases of suite {suite}, and compiling {compiled}"
        )
    chosen, left_out = validation.runnable(ops or checks.OPS, machine)
    if left_out:
        message = f"{', '.join(left_out)}: experimental on a GPU, --experimental runs the kernels"
        if not chosen:
            raise click.ClickException(message)
        out.print(f"[yellow]left out: {message}[/]")
    started = time.perf_counter()
    rows = checks.collect(chosen, suite, machine)
    try:
        with progress(out, "checks", len(rows)) as advance:
            results = validation.run(rows, machine, lambda result: advance(result.name))
    except machines.HangError as error:
        click.echo(f"Error: {error}", err=True)
        sys.stderr.flush()
        os._exit(1)  # a kernel that never ends would block an orderly exit
    failures = [result for result in results if not result.passed]
    for result in failures[:SHOWN_FAILURES]:
        out.print(f"[red]FAILED[/] {escape(f'{result.op}: {result.name}: {result.message}')}", soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        out.print(f"[red]and {len(failures) - SHOWN_FAILURES} more failures[/]")
    out.print(report.ops_table(results))
    if machine.gpu:
        out.print(report.kernels_table(results))
    compile_failed = not machine.gpu and not compile_kernels(out, variants.choose(ops=ops))
    remark = ", but not every kernel compiled" if compile_failed else ""
    write_json(json_path, validation.results_json(results, suite, machine))
    if record is not None:
        write_json(record, validation.record(results, suite, machine))
    passed = len(results) - len(failures)
    out.print(
        f"[{'red' if failures or compile_failed else 'green'}]{passed} of {len(results)} checks passed{remark}[/] in "
        f"{time.perf_counter() - started:.1f} s"
    )
    if failures or compile_failed:
        raise SystemExit(1)


# ---- bench


@cli.command()
@click.option("--op", type=click.Choice(["dense_decode", "sparse_decode", "sparse_prefill", "kv_quant"]),
              default="dense_decode", show_default=True)
@click.option("--case", "pattern", help="Only rows whose name contains this, such as '128,16' or 'graph'.")
@click.option("--peer-lib", "peer_paths", multiple=True, type=click.Path(),
              help="A torch extension with FlashMLA's or FlashAttention-3's kernels to measure beside ours; may be "
                   "repeated.")
@click.option("--graph", is_flag=True, help="Measure every row inside a CUDA graph (small batches always are).")
@click.option("--host", is_flag=True, help="Only the host time of an eager call and the first-call times.")
@click.option("--crossover", is_flag=True, help="sparse_decode: two CTAs share the dequantizing, which is not faster.")
@click.option("--codes/--no-codes", default=None,
              help="sparse_decode: by the kernel that multiplies FP8 codes as they are, or not (else as calls get it).")
@click.option("--combine", "merging", type=click.Choice(["plain", "pairs", "quarters"]),
              help="Decode: merge fp16 partial results by this kernel (else as calls get it).")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(1), help="Repetitions behind a median.")
@click.option("--plot", type=PNG, help="Write a roofline PNG.")
@click.option("--json", "json_path", type=FILE, help="Write every figure.")
@EXPERIMENTAL
def bench(op: str, pattern: str | None, peer_paths: tuple[str, ...], graph: bool, host: bool, crossover: bool,
          codes: bool | None, merging: str | None, repeats: int, plot: Path | None, json_path: Path | None) -> None:
    """Time the kernels, and peers on the same arrays in the same run (kv_quant: a plain copy)."""
    from flashmla_cupy.ops import combine, sparse_decode
    from flashmla_cupy.runtime import env as variables
    from flashmla_cupy.testing import bench as timing
    from flashmla_cupy.testing import bench_cases, peers, report
    from flashmla_cupy.testing import machine as machines
    from flashmla_cupy.testing.environment import versions

    variables.check()
    given = click.get_current_context().get_parameter_source
    for name, option in (("pattern", "--case"), ("peer_paths", "--peer-lib"), ("graph", "--graph"),
                         ("crossover", "--crossover"), ("codes", "--codes"), ("merging", "--combine"),
                         ("repeats", "--repeats"), ("plot", "--plot")):
        if host and given(name) is not click.core.ParameterSource.DEFAULT:
            raise ValueError(f"{option}: got it with --host, expected only one of the two: --host measures no rows")
    for wanted, option in ((crossover, "--crossover"), (codes is not None, "--codes")):
        if wanted and op != "sparse_decode":
            raise ValueError(f"{option}: got --op {op}, expected sparse_decode, which alone has it")
    if merging is not None and op not in ("dense_decode", "sparse_decode"):
        raise ValueError(f"--combine: got --op {op}, expected dense_decode or sparse_decode, which alone have it")
    if crossover and codes is not None:
        raise ValueError("--codes: got it with --crossover, expected only one of the two")
    if plot is not None and op == "kv_quant":
        raise ValueError("--plot: got a file, expected none with --op kv_quant, which has no FLOP for a roofline")
    cases = bench_cases.select(pattern, op)
    machine = machines.detect()
    if not machine.gpu:
        raise click.ClickException("bench: no GPU was found; `kernels compile` and `validate` work without one")
    out, rivals = console(), peers.load(list(peer_paths), op)
    if crossover:
        click.get_current_context().with_resource(sparse_decode.with_crossover())
    if codes is not None:
        click.get_current_context().with_resource(sparse_decode.with_codes(codes))
    if merging is not None:
        click.get_current_context().with_resource(combine.with_variant(merging))
    out.print(f"[bold]{escape(machine.name)}[/], {op}")
    rows, figures = [], {}
    if host or pattern is None:
        cold, warm = timing.first_calls(op)
        cost = timing.host_cost(bench_cases.ROWS[op][0])
        figures = {"host": vars(cost), "first_call": {"cold": vars(cold), "warm": vars(warm)}}
        out.print(report.host_line(cost))
        out.print("cold compile: " + ", ".join(f"{name} {spent:.2f} s" for name, spent in cold.compile_seconds.items()))
        out.print(
            f"first call in a fresh process: {cold.call_seconds:.2f} s cold, {warm.call_seconds:.3f} s with cached "
            f"cubins (CUDA context {warm.context_seconds:.2f} s apart)"
        )
    if not host:
        with progress(out, "rows", len(cases)) as advance:
            for case in cases:
                rows.append(timing.measure(case, rivals, graph=True if graph else None, repeats=repeats))
                advance(case.name)
        out.print(report.bench_table(rows, [peer.name for peer in rivals], op))
    for row in rows:
        for name, message in row.errors.items():
            out.print(f"[red]{escape(f'{row.case.name}: {name}: {message}')}[/]", soft_wrap=True)
    write_json(json_path, {**versions(machine), "rows": [row.as_json() for row in rows], **figures})
    if plot is not None and rows:
        report.roofline(rows, plot, op)
        out.print(f"roofline: {plot}")
    if any(row.errors for row in rows):
        raise SystemExit(1)


# ---- kernels


@cli.group()
def kernels() -> None:
    """The compiled variants (no GPU needed)."""


NAME = click.argument("name", default="")


def compile_kernels(out: Console, specs: list[Any], use_cache: bool = True, arch: str | None = None) -> bool:
    """Compiles and prints a table; False if any failed."""
    from flashmla_cupy.testing import kernels as variants
    from flashmla_cupy.testing import report

    with progress(out, "compile", len(specs)) as advance:
        rows = variants.compile_all(specs, use_cache=use_cache, arch=arch, on_done=advance)
    out.print(report.compiled_table(rows))
    failed = variants.errors(rows)
    print_errors(out, failed)
    return not failed


def print_errors(out: Console, errors: Iterable[Any]) -> None:
    for error in errors:
        out.print(f"[red]{escape(' '.join(str(error).split()))}[/]", soft_wrap=True)


@kernels.command("list")
def kernels_list() -> None:
    """How many variants there are, and why each exists."""
    from flashmla_cupy.testing import kernels as variants
    from flashmla_cupy.testing import report

    out, specs = console(), variants.choose()
    out.print(report.variants_table(specs))
    for op in dict.fromkeys(spec.op for spec in specs):
        count = sum(spec.op == op for spec in specs)
        out.print(f"{op}: {count} because of {variants.WHY.get(op, 'its template arguments')}")
    out.print(
        "Causal masking, page size, lengths, strides and head counts are run-time arguments: they cost no variant."
    )


@kernels.command("compile")
@NAME
@click.option("--fresh", is_flag=True, help="Compile even if the cache has the kernel.")
@click.option("--arch", type=Architecture(), help="For another GPU architecture, such as sm_90a.")
def kernels_compile(name: str, fresh: bool, arch: str | None) -> None:
    """Compile the kernels whose name contains NAME: registers, spills, shared memory, seconds."""
    from flashmla_cupy.testing import kernels as variants

    if not compile_kernels(console(), variants.choose(name), not fresh, arch):
        raise SystemExit(1)


@kernels.command("dump")
@NAME
@click.option("--to", "folder", type=OutputFolder(), default="kernels", show_default=True)
def kernels_dump(name: str, folder: Path) -> None:
    """Write generated source, PTX, cubin, SASS and compile log of the kernels whose name contains NAME."""
    from flashmla_cupy.testing import kernels as variants

    out, specs = console(), variants.choose(name)
    with progress(out, "dump", len(specs)) as advance:
        for spec in specs:
            files, missing = variants.dump(spec, folder)
            print_errors(out, [missing] if missing else [])
            out.print(f"{folder}: {' '.join(files)}", soft_wrap=True)
            advance(spec.name)


@kernels.command("watch")
@NAME
@click.option("--interval", default=0.5, show_default=True, type=click.FloatRange(0, 3600, min_open=True),
              help="Seconds between looks.")
@click.option("--rounds", type=int, hidden=True, help="Stop after this many looks.")
def kernels_watch(name: str, interval: float, rounds: int | None) -> None:
    """Compile again whenever a source file of the kernels whose name contains NAME changes; end with Ctrl-C."""
    from flashmla_cupy.runtime import source
    from flashmla_cupy.testing import kernels as variants

    out, specs = console(), variants.choose(name)
    out.print(f"watching {source.source_root()}", soft_wrap=True)  # OSError where there is none
    with contextlib.suppress(KeyboardInterrupt):
        for changed in variants.changes(specs, interval, rounds):
            compile_kernels(out, changed)


# ---- schedule


@cli.command()
@click.option("--lengths", help="KV lengths, comma separated; 4096x8 repeats one eight times.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1, MAX_REQUESTS),
              help="Requests to draw without --lengths.")
@click.option("--mean", default=4096, show_default=True, type=click.IntRange(0, MAX_INT32), help="Their mean length.")
@click.option("--varlen", is_flag=True, help="Draw lengths around the mean.")
@click.option("--h-q", default=128, show_default=True, type=click.IntRange(1, MAX_INT32))
@click.option("--h-kv", default=1, show_default=True, type=click.IntRange(1, MAX_INT32))
@click.option("--s-q", default=1, show_default=True, type=click.IntRange(1, MAX_INT32))
@click.option("--sm-count", type=click.IntRange(1, 65535), help="SMs of the GPU; the one here, else an H200's 132.")
@click.option("--png", type=PNG, help="Also write a picture.")
def schedule(lengths: str | None, batch: int, mean: int, varlen: bool, h_q: int, h_kv: int, s_q: int,
             sm_count: int | None, png: Path | None) -> None:
    """Show who works on what: requests x SM parts."""
    from flashmla_cupy.testing import machine as machines
    from flashmla_cupy.testing import report
    from flashmla_cupy.testing import schedule as schedules

    source_of = click.get_current_context().get_parameter_source
    for name in ("batch", "mean", "varlen"):
        if lengths is not None and source_of(name) is not ParameterSource.DEFAULT:
            raise ValueError(f"--{name}: got a value, expected none with --lengths, which names every request")
    if lengths is not None:
        values = schedules.parse_lengths(lengths)
    else:
        values = schedules.draw_lengths(batch, h_q, s_q, mean, varlen)
    tokens, metadata, num_splits = schedules.plan(values, h_q, h_kv, s_q, sm_count or machines.detect().sm_count)
    out = console()
    out.print(report.schedule_text(metadata, tokens, out.width, ascii_only=out.options.ascii_only))
    out.print(report.schedule_summary(metadata, num_splits, tokens), soft_wrap=True)
    if png is not None:
        report.schedule_png(metadata, tokens, png)
        out.print(f"picture: {png}")


# ---- env, cache


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def env(as_json: bool) -> None:
    """What this installation runs with: GPU, tool versions, cache, environment variables."""
    from flashmla_cupy.testing import environment, report
    from flashmla_cupy.testing import machine as machines

    facts = environment.facts(machines.detect())
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    else:
        console().print(report.facts_table(facts))

@cli.group()
def cache() -> None:
    """The cache of compiled kernels."""


@cache.command("info")
def cache_info() -> None:
    """Where it is and how large."""
    from flashmla_cupy.runtime import cache as store

    facts = store.info()
    if facts.directory is None:
        click.echo("no cache folder: there is no home directory, kernels are kept in memory")
        return
    note = "" if facts.writable else " (not writable: kernels are kept in memory)"
    if not facts.listable:
        note += " (this user cannot look into it)"
    elif facts.unreadable:
        note += f" ({facts.unreadable} of them not readable by this user, who compiles them again)"
    click.echo(f"{facts.directory}: {facts.entries} kernels, {facts.size_bytes / 1e6:.1f} MB{note}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove every compiled kernel."""
    from flashmla_cupy.runtime import cache as store

    click.echo(f"removed {store.clear()} kernels")


@cache.command("warmup")
@NAME
@EXPERIMENTAL
def cache_warmup(name: str) -> None:
    """Compile kernels into the cache, ahead of their first use.

    Those whose name contains NAME, or all; experimental ones only with --experimental.
    """
    from flashmla_cupy.ops._select import selectable
    from flashmla_cupy.runtime import cache as store
    from flashmla_cupy.runtime import compile as runtime_compile
    from flashmla_cupy.testing import kernels as variants
    from flashmla_cupy.testing import report

    if not store.info().writable:
        raise click.ClickException("cache warmup: the cache cannot be written, nothing would be kept (see cache info)")
    out, specs = console(), [spec for spec in variants.choose(name) if selectable(spec)]
    if not specs:
        raise click.ClickException(f"cache warmup: every kernel named *{name}* is experimental, add --experimental")
    with progress(out, "warmup", len(specs)) as advance:
        results = runtime_compile.warmup(specs, on_done=lambda spec, result: advance(spec.name))
    rows = [(spec.name, result) for spec, result in results.items()]
    out.print(report.compiled_table(rows))
    print_errors(out, variants.errors(rows))
    if variants.errors(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    cli()
