"""`edge-pc bench`: what reuse gives on this machine, and one machine against another."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_pc.cli.bench_options import Measurement, fill, measurement_options
from edge_pc.cli.options import Command, GroupedCommand, OutputOptions, option, output_options
from edge_pc.cli.output import Output

if TYPE_CHECKING:
    from edge_pc.bench.report import Section

_ELSEWHERE = {"report": "bench_output:report", "compare": "bench_output:compare"}


class Benches(click.Group):
    """The benches in the order of a reader's needs; commands in another file are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"edge_pc.cli.{module}"), name)
        return command


@click.group(cls=Benches)
def bench() -> None:
    """Measure what reuse gives on this machine, and compare machines.

    Every bench fills one section of a JSON report; interrupted, it goes on where it stopped. `bench report` makes a
    page of it.
    """


datasets_argument = click.argument("datasets", metavar="DATASET.jsonl[.gz]...", nargs=-1, required=True)
some_datasets_argument = click.argument("datasets", metavar="[DATASET.jsonl[.gz]...]", nargs=-1)


def items_option(default: int) -> Callable[[Command], Command]:
    """`--items`; `default` is what the bench's settings have."""
    text = f"Take the first N of each data set.  [default: {default}]"
    return option("--items", type=click.IntRange(min=1), metavar="N", help=text)


@bench.command("all", cls=GroupedCommand)
@some_datasets_argument
@measurement_options
@output_options
def all_benches(datasets: tuple[str, ...], measurement: Measurement, output: OutputOptions) -> None:
    """Run all benches, one after the other, and make the page. Accuracy needs data sets."""
    out, paths = Output(output), _paths(datasets)
    for name in ("ttft", "encode", "memory", "cases"):
        _run(name, measurement, out)
    _run("fidelity", measurement, out, datasets=paths)
    if paths:
        _run("accuracy", measurement, out, datasets=paths)
    from edge_pc.bench.page import page
    from edge_pc.bench.report import Report

    report = Path(measurement.report)
    report.with_suffix(".html").write_text(page(Report.load(report)), encoding="utf-8")
    out.note(f"wrote {report.with_suffix('.html')}")


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def ttft(measurement: Measurement, output: OutputOptions) -> None:
    """Time to the first token: reuse, full prefill, the limit, llama.cpp's own ways."""
    _run("ttft", measurement, Output(output))


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def encode(measurement: Measurement, output: OutputOptions) -> None:
    """Speed of encoding a schema, against full prefill of as many tokens."""
    _run("encode", measurement, Output(output))


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def memory(measurement: Measurement, output: OutputOptions) -> None:
    """Bytes per token, disk, and what prompts share that are open at once."""
    _run("memory", measurement, Output(output))


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def cases(measurement: Measurement, output: OutputOptions) -> None:
    """The paper's applications on the ready schemas: times, and both answers."""
    _run("cases", measurement, Output(output))


@bench.command(cls=GroupedCommand)
@some_datasets_argument
@items_option(20)
@measurement_options
@output_options
def fidelity(datasets: tuple[str, ...], items: int | None, measurement: Measurement, output: OutputOptions) -> None:
    """How close reuse is to full prefill, and under which conditions it is not.

    Data sets are questions about several documents; without any, only parameters are measured.
    """
    _run("fidelity", measurement, Output(output), items, datasets=_paths(datasets))


@bench.command(cls=GroupedCommand)
@datasets_argument
@items_option(100)
@measurement_options
@output_options
def accuracy(datasets: tuple[str, ...], items: int | None, measurement: Measurement, output: OutputOptions) -> None:
    """Right answers with reuse and without, on questions about documents.

    Takes the format of LongBench, and lines with `input`, `docs` and `answers`.
    """
    _run("accuracy", measurement, Output(output), items, datasets=_paths(datasets))


def _run(name: str, measurement: Measurement, out: Output, items: int | None = None, **inputs: Any) -> None:
    """Fill one section and say on stdout what was found; `inputs` go to what runs the bench."""
    run, kind, findings = _bench(name)
    settings = kind.quick() if measurement.quick else kind()
    if items is not None:
        settings = replace(settings, items=items)
    for line in findings(fill(name, partial(run, **inputs), settings, measurement, out)):
        out.answer(line + "\n")


def _paths(datasets: tuple[str, ...]) -> list[Path]:
    return [Path(path) for path in datasets]


def _bench(name: str) -> tuple[Any, Any, Any]:
    """(what runs it, its settings' class, section → sentences) of a bench."""
    if name == "ttft":
        from edge_pc.bench import ttft_summary
        from edge_pc.bench.run_ttft import run_ttft
        from edge_pc.bench.ttft import TtftSettings

        return run_ttft, TtftSettings, _of_summary(ttft_summary.findings)
    if name == "encode":
        from edge_pc.bench import encode

        return encode.run_encode, encode.EncodeSettings, _of_summary(encode.findings)
    if name == "memory":
        from edge_pc.bench import memory

        return memory.run_memory, memory.MemorySettings, _of_summary(memory.findings)
    if name == "cases":
        from edge_pc.bench import cases

        return cases.run_cases, cases.CasesSettings, cases.findings
    if name == "fidelity":
        from edge_pc.bench import fidelity, fidelity_summary

        return fidelity.run_fidelity, fidelity.FidelitySettings, _of_summary(fidelity_summary.findings)
    from edge_pc.bench import accuracy

    return accuracy.run_accuracy, accuracy.AccuracySettings, accuracy.findings


def _of_summary(findings: Any) -> Any:
    def of_section(section: Section) -> list[str]:
        lines: list[str] = findings(section.summary)
        return lines

    return of_section
