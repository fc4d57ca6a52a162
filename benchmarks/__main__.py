"""`python -m benchmarks NAME`: experiments that fill sections of a report of `edge-pc bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.benches import EXPERIMENTS
from edge_pc.cli import main
from edge_pc.cli.bench import (
    Measurement,
    measurement_options,
    measuring_command,
    name_option,
    reports_argument,
    run,
    write_comparison,
)
from edge_pc.cli.options import GroupedCommand, InOrder, OutputOptions, option, output_options
from edge_pc.cli.output import Output
from edge_pc.cli.values import PATH

# Those that take data sets, and how many items of each they take.
_ITEMS = {"fidelity": 20, "accuracy": 100}


def _paths(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(map(Path, values))


datasets_argument = click.argument("datasets", type=PATH, metavar="[DATASET.jsonl[.gz]...]", nargs=-1, callback=_paths)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def experiments() -> None:
    """Experiments on reuse. They fill sections of the report that `edge-pc bench` begins (-o)."""


for _name, _bench in EXPERIMENTS.items():
    _more: list[Any] = []
    if _name in _ITEMS:
        _help = f"Take the first N of each data set.  [default: {_ITEMS[_name]}]"
        _more = [datasets_argument, option("--items", type=click.IntRange(min=1), metavar="N", help=_help)]
    experiments.add_command(measuring_command(_name, _bench, *_more))


@experiments.command("all", cls=GroupedCommand)
@datasets_argument
@measurement_options
@output_options
def run_all(datasets: tuple[Path, ...], measurement: Measurement, output: OutputOptions) -> None:
    """Run all experiments, one after the other. Accuracy needs data sets."""
    out = Output(output)
    for name, bench in EXPERIMENTS.items():
        if name in _ITEMS and datasets:
            run({name: bench}, measurement, out, datasets=datasets)
        elif name != "accuracy":
            run({name: bench}, measurement, out)


@experiments.command("compare", cls=GroupedCommand)
@reports_argument
@name_option
@output_options
def compare(reports: tuple[str, ...], name: str, output: OutputOptions) -> None:
    """As `edge-pc bench compare`, with what explains the difference."""
    from benchmarks import explain

    write_comparison(explain.compare, reports, name, Output(output))


if __name__ == "__main__":
    raise SystemExit(main(group=experiments, name="python -m benchmarks"))
