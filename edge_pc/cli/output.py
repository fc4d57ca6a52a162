"""Where words go: the answer to stdout, all else to stderr; how much is said is one decision, made here."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from edge_pc.cli.options import OutputOptions

# update(done, total, text): how far the work is, in its own unit, and what is being worked on.
Update = Callable[[float, float, str], None]


def counted(number: int, noun: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prepare_streams() -> None:
    """UTF-8 on every locale; what cannot be written (half a character in a file's name) is shown escaped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def read_stdin() -> str:
    """The text on stdin, as UTF-8 on every locale.

    Raises:
        OptionError: it is not UTF-8.
    """
    from edge_pc.errors import OptionError

    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise OptionError(f"stdin is not UTF-8 text (byte {exc.start})", hint="convert it to UTF-8") from exc


def say_error(message: str, hint: str | None) -> None:
    """`error: …` and `hint: …` on stderr, whatever -q says."""
    sys.stderr.write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))
    sys.stderr.flush()


class Output:
    """What a command says, as its -q and -v ask.

    Attributes:
        quiet: nothing but answers and errors.
        verbose: 0, 1 or 2 (and more).
    """

    def __init__(self, options: OutputOptions) -> None:
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
        """Write one JSON object on one line; paths become text."""
        self.answer(json.dumps(value, ensure_ascii=False, default=str) + "\n")

    def note(self, text: str) -> None:
        """Say something on stderr, unless quiet."""
        if not self.quiet:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def detail(self, text: str) -> None:
        """Say something on stderr that only -v asks for."""
        if self.verbose:
            self.note(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, to_stderr: bool = False) -> None:
        """A table; columns whose name starts with `>` are numbers and stand to the right."""
        if to_stderr and self.quiet:
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            right = column.startswith(">")
            table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
        for row in rows:
            table.add_row(*[_plain(cell) for cell in row])
        console(sys.stderr if to_stderr else sys.stdout).print(table)

    @contextmanager
    def progress(self, label: str) -> Iterator[Update]:
        """A bar on a terminal, from the first update on; elsewhere, with -v, one line for each thing worked on."""
        if not self.bars:
            yield self._lines(label)
            return
        with ExitStack() as shown:
            bar: Update | None = None

            def update(done: float, total: float, text: str) -> None:
                nonlocal bar
                # Not before there is something to show: an answer whose states are stored does not wait for it.
                bar = bar or shown.enter_context(_bar(label))
                bar(done, total, text)

            yield update

    def _lines(self, label: str) -> Update:
        last = ""

        def update(done: float, total: float, text: str) -> None:
            nonlocal last
            if text != last:
                last = text
                self.detail(f"{label}: {text}")

        return update


def _plain(cell: object) -> Any:
    """Text of a user shown as it is: square brackets are no markup."""
    from rich.text import Text

    return Text("" if cell is None else str(cell))


def console(stream: TextIO) -> Console:
    """A rich console that never cuts what goes to a file or a pipe."""
    from rich.console import Console

    wide = None if stream.isatty() else 200
    return Console(file=stream, highlight=False, width=wide, soft_wrap=False)


@contextmanager
def _bar(label: str) -> Iterator[Update]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(label),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=None)

        def update(done: float, total: float, text: str) -> None:
            progress.update(task, completed=done, total=total or None, description=text)

        yield update


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Looked up at each call: a progress bar replaces sys.stderr while it is shown.
        sys.stderr.write(f"{record.levelname.lower()}: {record.getMessage()}\n")


def _show_log_of_library(level: int) -> None:
    logger = logging.getLogger("edge_pc")
    logger.handlers = [_Handler()]
    logger.propagate = False
    logger.setLevel(level)
