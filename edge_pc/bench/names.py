"""What people call the backends and the ways to serve a prompt."""

from __future__ import annotations

from collections.abc import Iterable

from edge_pc.bench.report import Row

BACKEND_NAMES = {"onnx": "ONNX Runtime", "llamacpp": "llama.cpp"}
WAY_NAMES = {
    "full": "full prefill",
    "cached": "reuse",
    "again": "reuse again",
    "in_place": "limit (in place)",
    "state_file": "state file",
    "load_state": "load_state",
    "ram_cache": "RAM cache",
}


def ordered_backends(rows: Iterable[Row]) -> list[str]:
    """The backends in the rows, in the order of our names for them."""
    found = {row["backend"] for row in rows if "backend" in row}
    return [backend for backend in BACKEND_NAMES if backend in found]
