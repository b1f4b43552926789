"""What the commands of cli.py share at the terminal: the console, progress, and options that name a file to write."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 30  # of progress where there is no terminal


def console() -> Console:
    """Wide enough for the tables when the output is not a terminal."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: stdout is closed
    return Console(width=None if on_terminal else 160, highlight=False)


@contextlib.contextmanager
def progress(out: Console, what: str, total: int) -> Iterator[Any]:
    """Yields advance(label): a bar on a terminal, elsewhere a line now and then."""
    if not out.is_terminal:
        yield _lines(what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[label]}"))
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=total, label="")
        yield lambda label="": bar.update(task, advance=1, label=escape(label[:60]))


def _lines(what: str, total: int) -> Callable[..., None]:
    done, last = 0, time.perf_counter()

    def advance(label: str = "") -> None:
        nonlocal done, last
        done += 1
        if time.perf_counter() - last >= SECONDS_BETWEEN_LINES:
            last = time.perf_counter()
            click.echo(f"{what}: {done} of {total}", err=True)

    return advance


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class OutputFile(click.Path):
    """A file to write; its folder is made, or the file refused, before the work. png: what will be written."""

    def __init__(self, png: bool = False) -> None:
        super().__init__(path_type=Path)
        self.png = png

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from flashmla_cupy.testing import report

        option = param.opts[0] if param else "file"
        if str(value) in ("", "-"):
            self.fail(f"got {str(value)!r}, expected the name of a file", param, ctx)
        path = super().convert(value, param, ctx)
        if self.png:
            report.check_picture(option, path)
        report.prepare_output(option, path)
        return path
