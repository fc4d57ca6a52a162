"""What benches measure ONNX Runtime with: full prefill of an exported model at any settings, and the kernels in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.onnx.arena import Arena
from edge_pc.backends.onnx.chunks import CHUNK_TOKENS
from edge_pc.backends.onnx.forward import Forward, open_session
from edge_pc.backends.onnx.layout import paged_layout
from edge_pc.models.spec import ModelSpec

# Settings to try beside the number of threads; the engine's own come first.
CHOICES = tuple({"chunk_tokens": tokens} for tokens in (CHUNK_TOKENS, 128, 512, 1024))

# What MLAS chooses for 8-bit blocks when it is loaded, by these flags, in this order (platform.cpp).
_BLOCK_KERNELS = {
    "AVX512-VNNI": {"AVX512F", "AVX512BW", "AVX512-VNNI"},
    "AVX512": {"AVX512F", "AVX512BW"},
    "AVX2-VNNI": {"AVX2", "AVX-VNNI"},
    "AVX2": {"AVX2", "FMA"},
    "NEON DOTPROD": {"DOTPROD"},
}


def fair_weights(model: Path) -> Path:
    """The exported folder as it is."""
    return model


def kernels(instruction_sets: Collection[str]) -> str:
    """What ONNX Runtime is expected to use; it does not tell."""
    sets = set(instruction_sets)
    blocks = next((name for name, needed in _BLOCK_KERNELS.items() if needed <= sets), "no vector kernel known")
    single = next((name for name in ("AVX512F", "AVX2", "AVX", "NEON") if name in sets), "SSE2 or unknown")
    return f"8-bit blocks: {blocks}; float32: {single} (by CPU flags)"


class FullPrefill:
    """Full prefill in its own session.

    Args:
        model: the exported folder.
        threads: compute threads.
        capacity: the longest prompt, in tokens.
    """

    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        spec = ModelSpec.load(model)
        session = open_session(model, threads=threads, provider="cpu", verbose=False)
        self._arena = Arena(paged_layout(spec, "float32"), spec.position, capacity)
        self._forward = Forward(session, spec, self._arena)

    def prefill(self, token_ids: IntArray, settings: Mapping[str, int]) -> Logits:
        """Compute all tokens; logits of the last, float32 `[vocab]`."""
        self._arena.place((), exact=False)
        logits: Logits = np.empty(0, dtype=np.float32)
        for start in range(0, len(token_ids), settings["chunk_tokens"]):
            positions = np.arange(start, min(start + settings["chunk_tokens"], len(token_ids)), dtype=np.int32)
            logits = self._forward(token_ids[positions], positions)
        return logits

    def close(self) -> None:
        """Nothing has to be freed."""
