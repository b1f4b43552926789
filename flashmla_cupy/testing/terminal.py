"""What the commands of cli.py share at the terminal: errors, the console, progress, and values of options."""

from __future__ import annotations

import contextlib
import json
import re
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
    done, last, printed = 0, time.perf_counter(), False

    def advance(label: str = "") -> None:
        nonlocal done, last, printed
        done += 1
        if time.perf_counter() - last >= SECONDS_BETWEEN_LINES or (done == total and printed):
            last, printed = time.perf_counter(), True
            click.echo(f"{what}: {done} of {total}", err=True)

    return advance


def write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class Group(click.Group):
    """Shows every expected error as one readable line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        from flashmla_cupy.errors import FlashMLAError

        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.exceptions.Abort, BrokenPipeError):
            raise  # click knows what to do when nobody reads on
        except (FlashMLAError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: CuPy's and torch's
            raise click.ClickException(" ".join(str(error).split())) from error


class Architecture(click.ParamType):
    """A GPU architecture for which NVRTC makes cubins."""

    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if re.fullmatch("sm_[0-9]{2,3}[af]?", value) is None:
            self.fail(f"got {value!r}, expected sm_ and a number, then a or f or nothing, such as sm_90a", param, ctx)
        return value


class OutputFolder(click.Path):
    """A folder to write into. It may be missing but not its parent: a path that was mistyped is refused."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from flashmla_cupy.testing import report

        path = super().convert(value, param, ctx)
        report.check_folder(param.opts[0] if param else "folder", path)
        return path


class OutputFile(click.Path):
    """A file to write; refused before the work where that will not be possible. png: what will be written."""

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
        report.check_file(option, path)
        return path
