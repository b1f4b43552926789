"""Tables and pictures of results: rich for the terminal, matplotlib for PNG files (imported when asked for)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.runtime import env
from flashmla_cupy.testing import work_model
from flashmla_cupy.testing.bench import OURS, HostCost, Row
from flashmla_cupy.testing.validate import Result, by_kernel

_COLORS = (
    "cyan",
    "magenta",
    "yellow",
    "green",
    "blue",
    "red",
    "bright_cyan",
    "bright_magenta",
    "bright_yellow",
    "bright_green",
    "bright_blue",
    "bright_red",
)
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:*#"


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


# ---- validate


def ops_table(results: list[Result]) -> Table:
    table = _table("Checks", "op", "passed", "failed", "worst out error", "worst lse error", "seconds")
    for op in dict.fromkeys(result.op for result in results):
        rows = [result for result in results if result.op == op]
        failed = sum(not row.passed for row in rows)
        table.add_row(
            op,
            str(len(rows) - failed),
            Text(str(failed), style="red bold" if failed else "green"),
            f"{max(row.out_error for row in rows):.2f}",
            f"{max(row.lse_error for row in rows):.2f}",
            f"{sum(row.seconds for row in rows):.1f}",
        )
    table.caption = "errors as fractions of what is allowed (1 is the limit)"
    table.caption_justify = "left"
    return table


def kernels_table(results: list[Result]) -> Table:
    table = _table("Kernels that ran", "kernel", "cases", "failed", "worst out error", "worst lse error")
    for name, row in by_kernel(results).items():
        table.add_row(name, str(row["cases"]), str(row["failed"]), f"{row['worst_out']:.2f}", f"{row['worst_lse']:.2f}")
    return table


def compiled_table(rows: Iterable[tuple[str, Any]]) -> Table:
    """rows: (kernel name, CompiledKernel or the exception)."""
    table = _table(
        "Compiled kernels",
        "kernel",
        "arch",
        "registers",
        "spill B",
        "stack B",
        "shared B",
        "threads",
        "cluster",
        "seconds",
        "",
    )
    for name, item in rows:
        if isinstance(item, Exception):
            table.add_row(name, "", "", "", "", "", "", "", "", Text("failed", style="red bold"))
            continue
        table.add_row(
            name,
            item.arch,
            str(item.registers),
            str(item.spill_bytes),
            str(item.local_bytes),
            str(item.record.smem_bytes),
            str(item.record.threads),
            str(item.record.cluster),
            f"{item.seconds:.2f}",
            "cached" if item.from_cache else "compiled",
        )
    return table


def variants_table(specs: list[Any]) -> Table:
    table = _table(f"{len(specs)} variants", "kernel", "source", "Config", "status", left=4)
    for spec in specs:
        config = f"Config<{', '.join(spec.config)}>" if spec.config else "Config"
        status = "experimental" if spec.experimental else "selected"
        table.add_row(spec.name, f"cuda_src/{spec.kernel_file}", config, status)
    return table


# ---- bench


BENCH_TITLES = {  # op -> title, what a row's name lists
    "dense_decode": ("Dense decode, bf16, page 64", "b,h_q,s_q,s_k"),
    "sparse_prefill": ("Sparse prefill, bf16", "s_q,s_kv,h_q,topk"),
    "sparse_decode": ("Decode, FP8 cache, sparse and dense", "b,h_q,s_q,topk (dense: s_k)"),
    "kv_quant": ("Cache conversion, 2^20 tokens, page 64", "layout, other type, direction"),
}


def bench_table(rows: list[Row], peers: list[str], op: str = "dense_decode") -> Table:
    title, names = BENCH_TITLES[op]
    converts = op == "kv_quant"
    columns = [names, "us", *(("GB/s", "copy GB/s", "share") if converts else ("TFLOP/s", "GB/s"))]
    for peer in peers:
        columns += [f"{peer} us", "ratio"]
    table = _table(f"{title} (median)", *columns)
    for row in rows:
        us, work = row.us[OURS], row.work
        cells: list[str | Text] = [row.case.name, f"{us:.1f}"]
        if converts:
            cells += [f"{work.gbps(us):.0f}", f"{row.copy_gbps:.0f}", f"{row.copy_share:.2f}"]
        else:
            cells += [f"{work.tflops(us):.0f}", f"{work.gbps(us):.0f}"]
        for peer in peers:
            ratio = row.ratio(peer)
            if ratio is None:
                cells += ["failed" if peer in row.errors else "", ""]
                continue
            style = "green" if ratio >= 1.0 else "yellow" if ratio >= 0.95 else "red"
            cells += [f"{row.us[peer]:.1f}", Text(f"{ratio:.3f}", style=style)]
        table.add_row(*cells)
    table.caption = (
        "share: GB/s over those of a plain device-to-device copy"
        if converts
        else "ratio: the peer's time over ours; above 1 ours is faster"
    )
    table.caption_justify = "left"
    return table


def host_line(cost: HostCost) -> str:
    return (
        f"host time of an eager call: {cost.total_us:.1f} us, of which {cost.without_launches_us:.1f} us beyond its "
        f"{cost.launches} launch{'es' * (cost.launches != 1)} ({', '.join(cost.kernels)})"
    )


def roofline(rows: list[Row], path: Path, op: str = "dense_decode") -> None:
    """FLOP per byte against TFLOP/s, under the measured ceilings of an H200."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5))
    x = np.logspace(0.5, 3.2, 200)
    axes.plot(
        x,
        np.minimum(x * work_model.H200_READ_GBPS / 1e3, work_model.H200_MATRIX_TFLOPS),
        color="0.4",
        lw=1.2,
        label=f"H200 ceilings: {work_model.H200_READ_GBPS / 1e3:.2f} TB/s, {work_model.H200_MATRIX_TFLOPS:.0f} TFLOP/s",
    )
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    for index, name in enumerate(names):
        for small, marker in ((False, "os^Dv"[index % 5]), (True, "x+1234"[index % 6])):
            points = [
                (row.work.intensity, row.work.tflops(row.us[name]))
                for row in rows
                if name in row.us and row.case.small == small
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker,
                    ms=6,
                    alpha=0.8,
                    color=f"C{index}",
                    ls="none",
                    label=name + (" (small batches)" if small else ""),
                )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=BENCH_TITLES[op][0])
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    _save(figure, path)


# ---- env


def facts_table(facts: dict[str, Any]) -> Table:
    """environment.facts: a row each, and one for each environment variable."""
    table = Table("", "", show_header=False)
    for key, value in facts.items():
        if not isinstance(value, dict):
            table.add_row(key, "none" if value is None else escape(str(value)))
            continue
        for name, row in value.items():
            text = escape(f"{'(unset)' if row['value'] is None else row['value']}  {row['meaning']}")
            table.add_row(name, text + (f"\n[red]{escape(row['problem'])}[/]" if row["problem"] else ""))
    return table


# ---- schedule


def schedule_spans(metadata: np.ndarray, lengths: np.ndarray, block_tokens: int = 64) -> list[tuple[int, int, int]]:
    """(part, request, blocks) of every fragment in a plan."""
    blocks = -(-np.maximum(lengths, 0) // block_tokens)
    spans = []
    for part, (begin, begin_block, end, end_block, *_) in enumerate(metadata.tolist()):
        for request in range(begin, min(end, len(blocks) - 1) + 1):
            first = begin_block if request == begin else 0
            last = end_block if request == end else int(blocks[request])
            spans.append((part, request, last - first))
    return spans


def schedule_summary(metadata: np.ndarray, num_splits: np.ndarray, lengths: np.ndarray) -> str:
    spans = schedule_spans(metadata, lengths)
    loads = np.zeros(len(metadata), np.int64)
    for part, _, count in spans:
        loads[part] += count
    split = int((np.diff(num_splits) > 1).sum())
    return (
        f"{len(lengths)} requests, {int(loads.sum())} KV blocks over {len(metadata)} SM parts; blocks a part: "
        f"{loads.min()} to {loads.max()}, mean {loads.mean():.1f}; {split} requests split, "
        f"{int(num_splits[-1])} fragments, most of one request {int(np.diff(num_splits).max(initial=0))}"
    )


def schedule_text(metadata: np.ndarray, lengths: np.ndarray, width: int, max_rows: int = 32,
                  ascii_only: bool = False) -> Text:
    """Requests (rows) x SM parts (columns): the darker, the more of a part's blocks belong to the request."""
    shades = _ASCII_SHADES if ascii_only else _SHADES
    parts, requests = len(metadata), len(lengths)
    label = 14
    columns, rows = max(1, min(parts, width - label - 1)), max(1, min(requests, max_rows))
    grid = np.zeros((rows, columns))
    for part, request, count in schedule_spans(metadata, lengths):
        grid[request * rows // requests, part * columns // parts] += count
    full = grid.max() or 1.0
    text = Text(no_wrap=True)
    text.append(f"{'request':>{label - 1}} SM part 0 .. {parts - 1}\n", style="bold")
    for row in range(rows):
        first = -(-row * requests // rows)
        last = -(-(row + 1) * requests // rows) - 1
        name = f"{first}" if first == last else f"{first}..{last}"
        text.append(f"{name:>{label - 1}} ")
        for value in grid[row]:
            shade = 0 if value == 0 else 1 + min(3, int(value / full * 3.999))
            text.append(shades[shade], style=_COLORS[row % len(_COLORS)])
        text.append("\n")
    return text


def schedule_png(metadata: np.ndarray, lengths: np.ndarray, path: Path) -> None:
    """One bar per SM part, a colour per request; a fragment of a split request is hatched."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, max(3.0, min(14.0, 0.11 * len(metadata) + 1.5))))
    spans = schedule_spans(metadata, lengths)
    pieces = np.bincount([request for _, request, _ in spans], minlength=len(lengths))
    ends = np.zeros(len(metadata))
    colors = plt.get_cmap("tab20").colors
    for part, request, count in spans:
        axes.barh(
            part,
            count,
            left=ends[part],
            height=0.9,
            color=colors[request % len(colors)],
            edgecolor="white",
            lw=0.3,
            hatch="////" if pieces[request] > 1 else None,
        )
        if count and len(metadata) <= 140 and len(lengths) <= 200:
            axes.text(ends[part] + count / 2, part, str(request), ha="center", va="center", fontsize=4)
        ends[part] += count
    axes.set(
        xlabel="KV blocks of 64 tokens",
        ylabel="SM part",
        title="Who works on what (number: request, hatched: split)",
        ylim=(len(metadata) - 0.5, -0.5),
    )
    _save(figure, path)


def check_picture(option: str, path: Path) -> None:
    """Raises FlashMLAError when no picture can be made or it would not be what its name says; imports nothing."""
    if find_spec("matplotlib") is None:
        raise FlashMLAError(f"{option}: matplotlib is not installed (pip install matplotlib)")
    if path.suffix.lower() not in ("", ".png"):
        raise FlashMLAError(f"{option}: got {str(path)!r}, expected a name that ends in .png")


def check_file(option: str, path: Path) -> None:
    """Raises FlashMLAError when a file cannot be written there, also where its folder is missing."""
    if not os.path.isdir(path.parent):
        raise FlashMLAError(f"{option}: got {str(path)!r}, expected a file in a folder that exists")
    if os.path.isdir(path) or not (os.access(path, os.W_OK) if os.path.exists(path) else env.can_write(path.parent)):
        raise FlashMLAError(f"{option}: got {str(path)!r}, expected a file that can be written")


def check_folder(option: str, path: Path) -> None:
    """The same for a folder, which may be missing but not its parent."""
    if not os.path.isdir(path.parent):
        raise FlashMLAError(f"{option}: got {str(path)!r}, expected a folder whose parent exists")
    if not env.can_write(path):
        raise FlashMLAError(f"{option}: got {str(path)!r}, expected a folder that can be written")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150, format="png")
    except (OSError, ValueError) as error:
        raise FlashMLAError(f"plot: {path} not written: {error}") from None
    finally:
        _pyplot().close(figure)
