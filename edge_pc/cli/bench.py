"""`edge-pc bench`: what reuse gives on this machine, and one machine against another."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from edge_pc.cli.bench_options import Measurement, fill, measurement_options
from edge_pc.cli.options import GroupedCommand, OutputOptions, output_options
from edge_pc.cli.output import Output

if TYPE_CHECKING:
    from edge_pc.bench.report import Section

_ELSEWHERE = {"compare": "bench_output:compare", "report": "bench_output:report"}


class Benches(click.Group):
    """The benches in the order of a reader's needs; those in other files are imported when they are needed."""

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


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def ttft(measurement: Measurement, output: OutputOptions) -> None:
    """Time to the first token: reuse, full prefill, the limit, and llama.cpp's own ways.

    About 15 minutes for both backends on two cores; --quick: one.
    """
    from edge_pc.bench.run_ttft import SECTION, run_ttft
    from edge_pc.bench.ttft import TtftSettings
    from edge_pc.bench.ttft_summary import findings

    out = Output(output)
    settings = TtftSettings.quick() if measurement.quick else TtftSettings()
    _say(out, fill(SECTION, run_ttft, settings, measurement, out), findings)


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def memory(measurement: Measurement, output: OutputOptions) -> None:
    """Bytes per token, disk, and what prompts share that are open at once."""
    from edge_pc.bench.memory import SECTION, MemorySettings, findings, run_memory

    out = Output(output)
    settings = MemorySettings.quick() if measurement.quick else MemorySettings()
    _say(out, fill(SECTION, run_memory, settings, measurement, out), findings)


@bench.command(cls=GroupedCommand)
@measurement_options
@output_options
def encode(measurement: Measurement, output: OutputOptions) -> None:
    """Speed of encoding a schema, against full prefill of as many tokens."""
    from edge_pc.bench.encode import SECTION, EncodeSettings, findings, run_encode

    out = Output(output)
    settings = EncodeSettings.quick() if measurement.quick else EncodeSettings()
    _say(out, fill(SECTION, run_encode, settings, measurement, out), findings)


def _say(out: Output, section: Section, findings: Callable[[dict[str, Any]], list[str]]) -> None:
    """What a bench found, in sentences, on stdout."""
    for line in findings(section.summary):
        out.answer(line + "\n")
