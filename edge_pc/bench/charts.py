"""Pictures of a report. Lines differ in style and marker, bars in hatching, so that they need no colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_pc.bench.names import BACKEND_NAMES, WAY_NAMES
from edge_pc.bench.report import Row
from edge_pc.bench.ttft_summary import OTHER_WAYS, paired, rows_of, ttft
from edge_pc.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the paper's Figure 4: speed-ups on CPUs at about 5000 tokens.
_PAPER_TOKENS, _PAPER_LOW, _PAPER_HIGH = 5000, 20, 70
_STAGES = ("parse", "assembly", "forward")
_FILLS = (("#ffffff", ""), ("#b0b0b0", "////"), ("#e4e4e4", "...."))


@dataclass(frozen=True, slots=True)
class Style:
    """How a line is drawn; `fill` is the inside of its markers."""

    color: str
    dashes: str
    marker: str
    fill: str = "white"


# Colour and filled or open markers tell the backend, dashes and the marker's form tell the way.
_COLORS = {"onnx": "#0b4f8a", "llamacpp": "#b3541e"}
_WAYS = {
    "full": ("-", "s"),
    "cached": ("--", "o"),
    "again": ("-.", "v"),
    "in_place": (":", "x"),
    "state_file": ("-.", "D"),
    "load_state": (":", "P"),
    "ram_cache": ("-.", "^"),
}


def style(backend: str, way: str) -> Style:
    dashes, marker = _WAYS[way]
    color = _COLORS[backend]
    return Style(color, dashes, marker, color if backend == "onnx" else "white")


def new_figure(columns: int = 1, height: float = 4.0, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, row after row.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as exc:
        raise MissingDependencyError(
            "pictures need matplotlib, which is not installed", hint='pip install "edge-prompt-cache[plot]"'
        ) from exc
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (6.2 * columns, height * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for each in axes:
        each.grid(True, which="major", color="#cccccc", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg_image(figure: Figure, alt: str) -> str:
    """The figure as an HTML image with all its bytes inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    close(figure)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'


def close(figure: Figure) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def length_chart(rows: Sequence[Row], backends: Sequence[str]) -> Figure:
    """TTFT over cached length, and the speed-up."""
    figure, (times, ratios) = new_figure(2, 4.6)
    for backend in backends:
        for way in ("full", *OTHER_WAYS, "cached", "in_place"):
            plot_ttft(times, rows_of(rows, backend, "length", way), "cached_tokens", backend, way)
        pairs = paired(rows, backend, "length", "cached", "full")
        plot_line(
            ratios,
            [row["cached_tokens"] for row, _ in pairs],
            [ttft(full) / ttft(cached) for cached, full in pairs],
            style(backend, "cached"),
            BACKEND_NAMES[backend],
        )
    log_axes(times, "cached tokens (32 new tokens)", "time to first token (ms)")
    log_axes(ratios, "cached tokens (32 new tokens)", "full prefill / reuse (×)")
    ratios.plot(
        [_PAPER_TOKENS] * 2, [_PAPER_LOW, _PAPER_HIGH], color="black", linewidth=2, marker="_", markersize=14,
        label="paper, Fig. 4, on CPUs",
    )  # fmt: skip
    ratios.axhline(1, color="black", linewidth=0.8)
    add_legend(times, 7.5)
    add_legend(ratios, 8)
    return figure


def prompt_chart(rows: Sequence[Row], backends: Sequence[str]) -> Figure:
    """TTFT over new tokens, and over the share of the prompt that is cached."""
    figure, (new, share) = new_figure(2)
    for backend in backends:
        for way in ("full", "cached", "in_place"):
            plot_ttft(new, rows_of(rows, backend, "new", way), "new_tokens", backend, way)
            found = rows_of(rows, backend, "share", way)
            shares = [100 * row["cached_tokens"] / (row["cached_tokens"] + row["new_tokens"]) for row in found]
            plot_line(share, shares, [ttft(row) for row in found], style(backend, way), _name(backend, way))
    base = next((row["cached_tokens"] for row in rows if "new" in row.get("axes", ())), 0)
    log_axes(new, f"new tokens ({base} cached)", "time to first token (ms)")
    share.set_yscale("log")
    _plain_numbers(share.yaxis)
    share.set_xlabel("share of the prompt that is cached (%)")
    share.set_ylabel("time to first token (ms)")
    for axes in (new, share):
        add_legend(axes, 7.5)
    return figure


def stages_chart(rows: Sequence[Row], backends: Sequence[str]) -> Figure:
    """What a cached TTFT is made of, by number of modules and by page cache."""
    figure, (modules, pages) = new_figure(2)
    by_modules = [
        (f"{BACKEND_NAMES[b]}\n{row['modules']}", row)
        for b in backends
        for row in rows_of(rows, b, "modules", "cached")
    ]
    stacked_bars(modules, by_modules)
    modules.set_xlabel("modules that share the cached tokens")
    by_pages = []
    for backend in backends:
        cold = {row["cached_tokens"]: row for row in rows_of(rows, backend, "length", "cached", "cold")}
        for row in rows_of(rows, backend, "length", "cached")[-3:]:
            if row["cached_tokens"] in cold:
                name = f"{row['cached_tokens']}"
                by_pages += [(f"{name}\nwarm", row), (f"{name}\ncold", cold[row["cached_tokens"]])]
    stacked_bars(pages, by_pages)
    pages.set_xlabel("cached tokens, page cache (" + ", then ".join(BACKEND_NAMES[b] for b in backends) + ")")
    return figure


def stacked_bars(axes: Axes, named: Sequence[tuple[str, Row]]) -> None:
    """A bar for each row, its stages upon one another."""
    places = range(len(named))
    bottom = [0.0] * len(named)
    for number, stage in enumerate(_STAGES):
        heights = [float(row["median_ms"][stage]) for _, row in named]
        axes.bar(
            places, heights, 0.7, bottom=bottom, label=stage, color=_FILLS[number][0], hatch=_FILLS[number][1],
            edgecolor="black", linewidth=0.6,
        )  # fmt: skip
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_xticks(list(places), [name for name, _ in named], fontsize=8)
    axes.set_ylabel("time to first token (ms)")
    axes.margins(y=0.25)
    axes.grid(False, axis="x")
    add_legend(axes, 8)


def grouped_bars(axes: Axes, groups: Sequence[str], bars: dict[str, Sequence[float]]) -> None:
    """For each group one bar of every kind, side by side, with its value above it."""
    width = 0.8 / len(bars)
    for number, (name, heights) in enumerate(bars.items()):
        places = [index + (number - (len(bars) - 1) / 2) * width for index in range(len(groups))]
        drawn = axes.bar(
            places, heights, width * 0.92, label=name, color=_FILLS[number][0], hatch=_FILLS[number][1],
            edgecolor="black", linewidth=0.6,
        )  # fmt: skip
        axes.bar_label(drawn, fmt="{:,.0f}", fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.grid(False, axis="x")
    axes.margins(y=0.15)
    add_legend(axes, 8)


def add_legend(axes: Axes, size: float) -> None:
    """A legend, if there is anything to explain."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=size, framealpha=0.9)


def plot_ttft(axes: Axes, rows: Sequence[Row], field: str, backend: str, way: str) -> None:
    """Median TTFT with its quartiles."""
    if not rows:
        return
    x, y = [row[field] for row in rows], [ttft(row) for row in rows]
    drawn = style(backend, way)
    plot_line(axes, x, y, drawn, _name(backend, way))
    low = [max(0.0, m - row["quartiles_ms"]["ttft"][0]) for m, row in zip(y, rows, strict=True)]
    high = [max(0.0, row["quartiles_ms"]["ttft"][1] - m) for m, row in zip(y, rows, strict=True)]
    axes.errorbar(x, y, [low, high], fmt="none", ecolor=drawn.color, elinewidth=0.8, capsize=2)


def plot_line(axes: Axes, x: Sequence[float], y: Sequence[float], drawn: Style, label: str) -> None:
    if len(x):
        axes.plot(
            x, y, linestyle=drawn.dashes, marker=drawn.marker, color=drawn.color, label=label, markersize=5,
            markerfacecolor=drawn.fill, linewidth=1.4,
        )  # fmt: skip


def _name(backend: str, way: str) -> str:
    return f"{BACKEND_NAMES[backend]}: {WAY_NAMES[way]}"


def log_axes(axes: Axes, x: str, y: str) -> None:
    """Logarithmic axes with their labels, numbers written out."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis)


def _plain_numbers(axis: Any) -> None:
    """1000, not 10³; on axes of base 10 also 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_transform().base == 10:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
