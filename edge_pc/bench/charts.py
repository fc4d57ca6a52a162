"""Pictures as data: benches make them, reports hold them, pages draw them with matplotlib."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_pc.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What differs in kind differs in dashes and markers, so that lines need no colour; who it is, tint and fill tell.
_STYLES = (("-", "s"), ("--", "o"), (":", "x"), ("-.", "v"), ("-.", "D"), (":", "P"))
_TINTS = ("#0b4f8a", "#b3541e", "#3c7a34", "#6b3fa0")
_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A line.

    Attributes:
        name: in the legend.
        x, y: of its points.
        low, high: the spread of `y`; empty without one.
        who, kind: numbers that choose its tint and its style.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    who: int = 0
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over axes with these labels; `y` is logarithmic, and `x` unless it is a share."""

    x: str
    y: str
    lines: tuple[Line, ...]
    title: str = ""
    log_x: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """Charts side by side, two in a row, and what they show."""

    caption: str
    charts: tuple[Chart, ...]

    def draw(self) -> Figure:
        """Draw it.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        require_matplotlib()
        from matplotlib.figure import Figure

        rows = -(-len(self.charts) // _COLUMNS)
        figure = Figure(figsize=(6.2 * _COLUMNS, 4.6 * rows), layout="constrained")
        for chart, axes in zip(self.charts, figure.subplots(rows, _COLUMNS, squeeze=False).flat, strict=True):
            _draw(chart, axes)
        return figure

    def svg(self) -> str:
        """An address that holds all its bytes."""
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format="svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")

    def save(self, path: Path) -> None:
        """Write it as PNG."""
        self.draw().savefig(path, dpi=130)


def require_matplotlib() -> None:
    """See that pictures can be drawn, before anything that takes long.

    Raises:
        MissingDependencyError: they cannot.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "pages and pictures need matplotlib, which is not installed",
            hint='pip install "edge-prompt-cache[plot]"',
        )


def _draw(chart: Chart, axes: Axes) -> None:
    for line in chart.lines:
        dashes, marker = _STYLES[line.kind % len(_STYLES)]
        tint = _TINTS[line.who % len(_TINTS)]
        look: dict[str, Any] = {"linestyle": dashes, "marker": marker, "color": tint, "label": line.name}
        fill = "white" if line.who % 2 else tint
        axes.plot(line.x, line.y, **look, markersize=5, linewidth=1.4, markerfacecolor=fill)
        if line.low:
            spread = np.abs(np.subtract([line.low, line.high], line.y))
            axes.errorbar(line.x, line.y, spread, fmt="none", ecolor=tint, elinewidth=0.8, capsize=2)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        _write_numbers_out(axes.xaxis)
    axes.set_yscale("log")
    _write_numbers_out(axes.yaxis)
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.set_title(chart.title, fontsize=10)
    axes.grid(True, which="major", color="#cccccc", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.lines:
        axes.legend(fontsize=7.5, framealpha=0.9)


def _write_numbers_out(axis: Any) -> None:
    """1000, not 10³; on axes of base 10 also 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_transform().base == 10:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
