"""Options that the benches share, and the report that they fill."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_pc.checks import THREADS
from edge_pc.cli.options import grouped, model_option, option
from edge_pc.cli.values import number
from edge_pc.progress import Progress as HowFar

if TYPE_CHECKING:
    from edge_pc.bench.report import Progress, Report, Section
    from edge_pc.bench.setup import BenchOptions
    from edge_pc.cli.output import Output

DEFAULT_REPORT = "edge-pc-bench.json"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured, and where the numbers go."""

    model: str
    gguf: str | None
    backend: tuple[str, ...]
    threads: int | None
    bench_dir: str | None
    report: str
    quick: bool
    restart: bool

    def options(self) -> BenchOptions:
        from edge_pc.bench.setup import BenchOptions

        gguf, folder = (Path(path) if path else None for path in (self.gguf, self.bench_dir))
        return BenchOptions(self.model, gguf, self.backend, self.threads, folder)


_MODEL, _REPORT = "Model and backends", "Report"
measurement_options = grouped(
    Measurement,
    "measurement",
    model_option,
    option(
        "--gguf",
        group=_MODEL,
        metavar="FILE",
        help="The file for llama.cpp.  [default: a pulled model's weights in Q8_0, made once]",
    ),
    option(
        "--backend",
        group=_MODEL,
        type=click.Choice(["onnx", "llamacpp"]),
        multiple=True,
        help="What runs the model. Repeatable.  [default: all that are installed]",
    ),
    option(
        "--threads",
        group=_MODEL,
        type=number(THREADS),
        metavar="N",
        help="Compute threads.  [default: what is fastest for a full prefill]",
    ),
    option(
        "--bench-dir",
        group=_MODEL,
        metavar="DIR",
        help="A folder for the states while they are measured.  [default: below the cache home, deleted at the end]",
    ),
    option(
        "-o",
        "--report",
        group=_REPORT,
        metavar="FILE",
        default=DEFAULT_REPORT,
        show_default=True,
        help="The JSON report to fill; what it has already is not measured again.",
    ),
    option("--quick", group=_REPORT, is_flag=True, help="A small size, to see that all works."),
    option("--restart", group=_REPORT, is_flag=True, help="Measure the section anew."),
)

# What fills a section: (report, options, settings, progress, command=, restart=) → the section.
Run = Callable[..., "Section"]


def open_report(measurement: Measurement, output: Output) -> Report:
    """The report that `-o` names: to go on with, or a new one, for which the machine is measured first.

    Raises:
        OptionError: it is of another machine or another model.
    """
    from dataclasses import asdict

    from edge_pc.bench.machine import machine_facts, versions
    from edge_pc.bench.report import Report
    from edge_pc.bench.setup import shared_settings
    from edge_pc.system.machine import describe_machine

    path = Path(measurement.report)
    settings = shared_settings(measurement.options())
    if path.exists():
        output.note(f"going on with {path}")
        return Report.resume(path, machine=asdict(describe_machine()) | {"versions": versions()}, settings=settings)
    output.note("measuring the machine")
    return Report.create(path, command=command_line(), machine=machine_facts(), settings=settings)


def command_line() -> list[str]:
    """The words that a person typed."""
    return ["edge-pc", *sys.argv[1:]]


def fill(name: str, run: Run, settings: Any, measurement: Measurement, output: Output) -> Section:
    """Run one bench into the report, with progress; an interruption leaves what is measured."""
    report = open_report(measurement, output)
    with output.progress(name) as update:

        def progress(done: int, total: int, text: str) -> None:
            update(HowFar(done, total, text))

        shown: Progress = progress
        return run(
            report,
            measurement.options(),
            settings,
            shown,
            command=command_line(),
            restart=measurement.restart,
        )
