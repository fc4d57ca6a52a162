"""Draws README.md's picture, `docs/ttft.svg`, from a report (`make docs`).

The file says in its metadata which points it shows and which version of this script drew it. It is drawn again only
when one of the two has changed, since another version of matplotlib draws the same picture with other bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

from edge_pc.bench.report import Report
from edge_pc.bench.rows import TtftRow
from edge_pc.bench.ttft_tables import pairs

DOCS = Path(__file__).resolve().parent
REPORT = DOCS / "results" / "amd-epyc" / "report.json"
PICTURE = DOCS / "ttft.svg"
FULL, REUSE = "#b3541e", "#0b4f8a"
LABELLED = 4096

Point = Sequence[float]


def points() -> list[Point]:
    """(cached tokens, full prefill in ms, reuse in ms) of each length that the report measured; medians."""
    rows = Report.load(REPORT).rows("ttft", TtftRow)
    both = pairs(rows, "onnx", "length", "cached", "full")
    return [(reuse.cached_tokens, round(full.ttft, 1), round(reuse.ttft, 1)) for reuse, full in both]


def source() -> str:
    """What the picture is made from, as its metadata hold it."""
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return json.dumps({"points": points(), "script": script})


def stated(svg: str) -> str:
    """What a picture says it was made from."""
    _, _, rest = svg.partition("<dc:description>")
    return unescape(rest.partition("</dc:description>")[0])


def words(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def figure(drawn: Sequence[Point]) -> Any:
    """Both lines on linear axes, as a person waits; on its own white ground, for light and dark pages."""
    from matplotlib.figure import Figure

    tokens, full, reuse = ([point[place] for point in drawn] for place in range(3))
    made = Figure(figsize=(5.6, 3.7), layout="constrained", facecolor="white")
    axes = made.subplots()
    for ms, colour, marker in ((full, FULL, "s"), (reuse, REUSE, "o")):
        axes.plot(tokens, [value / 1000 for value in ms], color=colour, marker=marker, linewidth=2.5, markersize=6)
    texts = {"size": 13, "weight": "bold"}
    for count, slow, fast in drawn:
        if count >= LABELLED:
            axes.annotate(
                words(slow), (count, slow / 1000), (-10, 4), textcoords="offset points", ha="right", color=FULL, **texts
            )
            axes.annotate(
                words(fast), (count, fast / 1000), (0, 9), textcoords="offset points", ha="center", color=REUSE, **texts
            )
    axes.text(0.03, 0.83, "full prefill", transform=axes.transAxes, color=FULL, **texts)
    axes.text(0.03, 0.73, "reuse", transform=axes.transAxes, color=REUSE, **texts)
    axes.set_title("Time to first token", loc="left", size=14)
    axes.set_xlabel("cached tokens in the prompt", size=13)
    axes.set_ylabel("seconds", size=13)
    axes.set_xticks([0, 2048, LABELLED, 6144, 8192])
    axes.tick_params(labelsize=12)
    axes.set_xlim(0, 8700)
    axes.set_ylim(0, 27)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    return made


def main() -> None:
    made_from = source()
    if PICTURE.exists() and stated(PICTURE.read_text(encoding="utf-8")) == made_from:
        sys.stdout.write(f"{PICTURE.name} is up to date\n")
        return
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "edge-pc", "font.family": "DejaVu Sans"}):
        metadata = {"Date": None, "Creator": None, "Description": made_from}
        figure(points()).savefig(PICTURE, format="svg", metadata=metadata)
    text = PICTURE.read_text(encoding="utf-8")
    PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    sys.stdout.write(f"drew {PICTURE.name}\n")


if __name__ == "__main__":
    main()
