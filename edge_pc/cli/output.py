"""Where words go: the answer to stdout, all else to stderr; how much is said is one decision, made here."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from edge_pc.cli.streams import say
from edge_pc.progress import OnProgress, Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from edge_pc.cli.options import OutputOptions

# Without a terminal for a bar, long work reports its progress every so many seconds.
SECONDS_BETWEEN_LINES = 5.0

# Nothing is cut or folded that goes to a file or a pipe.
_ENDLESS = 10_000


def counted(number: int, noun: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Output:
    """What a command says, as its -q and -v ask.

    Attributes:
        quiet: nothing but answers and errors.
        verbose: 0, 1 or 2 (and more).
        bars: progress is shown as a bar.
    """

    def __init__(self, options: OutputOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.quiet = options.quiet
        self.verbose = options.verbose
        self.bars = not self.quiet and sys.stderr.isatty()
        _show_log_of_library(self._log_level())

    def _log_level(self) -> int:
        if self.quiet:
            return logging.ERROR
        return (logging.WARNING, logging.INFO, logging.DEBUG)[min(self.verbose, 2)]

    def answer(self, text: str) -> None:
        """Write a piece of the answer at once, as it is."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def json(self, value: object) -> None:
        """Write one JSON object on one line; paths become text, and what is no finite number becomes null."""
        self.answer(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str) + "\n")

    def note(self, text: str) -> None:
        """Say something on stderr, unless quiet."""
        if not self.quiet:
            say(text + "\n")

    def show(self, renderable: RenderableType) -> None:
        """Write what rich can draw to stdout."""
        self.answer(_drawn(renderable, _console(sys.stdout)))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, to_stderr: bool = False) -> None:
        """A table; columns whose name starts with `>` are numbers and stand to the right.

        Where a terminal is too narrow for the words, each row becomes a list of its cells.
        """
        if to_stderr and self.quiet:
            return
        console = _console(sys.stderr if to_stderr else sys.stdout)
        table = _table(columns, rows)
        words_need = console.measure(table, options=console.options.update_width(_ENDLESS)).minimum
        if words_need > console.width:
            table = _records([column.lstrip(">") for column in columns], rows)
        text = _drawn(table, console)
        if to_stderr:
            say(text)
        else:
            self.answer(text)

    @contextmanager
    def progress(self, label: str) -> Iterator[OnProgress]:
        """A bar on a terminal, from the first update on; elsewhere a line now and then."""
        if not self.bars:
            yield self._lines(label)
            return
        with ExitStack() as shown:
            bar: OnProgress | None = None

            def update(progress: Progress) -> None:
                nonlocal bar
                # Not before there is something to show: an answer whose states are stored does not wait for it.
                bar = bar or shown.enter_context(_bar(label))
                bar(progress)

            yield update

    def _lines(self, label: str) -> OnProgress:
        """A line once in a few seconds, and with -v one for each thing worked on."""
        said, said_at = "", self._clock()

        def update(progress: Progress) -> None:
            nonlocal said, said_at
            new = self.verbose and progress.text != said
            if new or self._clock() - said_at >= SECONDS_BETWEEN_LINES:
                said, said_at = progress.text, self._clock()
                share = f", {100 * progress.done // progress.total} %" if progress.total else ""
                self.note(f"{label}: {progress.text}{share}")

        return update


def _finite(value: object) -> object:
    """`value` without what JSON cannot say: infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _records(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A list of names and cells for each row, an empty line between two rows."""
    from rich.table import Table

    records = Table.grid(padding=(0, 2, 0, 0))
    records.add_column(style="bold", no_wrap=True)
    records.add_column(overflow="fold")
    for number, row in enumerate(rows):
        if number:
            records.add_row()
        for name, cell in zip(names, row, strict=True):
            records.add_row(name, _plain(cell))
    return records


def _plain(cell: object) -> Any:
    """Text of a user shown as it is: square brackets are no markup. Text that is styled already stays so."""
    from rich.text import Text

    return cell if isinstance(cell, Text) else Text("" if cell is None else str(cell))


def _console(stream: TextIO) -> Console:
    """A console that draws for `stream`, but into memory: `Output` writes, and knows what to do where that fails."""
    from rich.console import Console

    terminal = stream.isatty()
    width = None if terminal else _ENDLESS
    return Console(file=io.StringIO(), force_terminal=terminal or None, highlight=False, width=width)


def _drawn(renderable: RenderableType, console: Console) -> str:
    with console.capture() as capture:
        console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


@contextmanager
def _bar(label: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn(label),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", markup=False),
    )
    with Bars(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        task = bars.add_task("", total=None)

        def update(progress: Progress) -> None:
            bars.update(task, completed=progress.done, total=progress.total or None, description=progress.text)

        yield update


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}\n")


def _show_log_of_library(level: int) -> None:
    logger = logging.getLogger("edge_pc")
    logger.handlers = [_Handler()]
    logger.propagate = False
    logger.setLevel(level)
