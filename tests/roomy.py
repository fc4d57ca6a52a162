"""The tiny model with room for whole documents: its tokens are hardly more than bytes."""

from __future__ import annotations

from pathlib import Path

import tiny


def export_roomy(folder: Path) -> Path:
    """Export it with 32-bit weights into a folder below `folder`."""
    from edge_pc.export import export

    return export(
        tiny.write_gguf(folder / "roomy.gguf", tiny.TinyModel(max_positions=16384)), folder / "roomy", bits=32
    )
