"""Full prefill of the exported graph with any number of threads and any size of chunks: candidates for the baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.onnx.arena import Arena
from edge_pc.backends.onnx.backend import kv_layout
from edge_pc.backends.onnx.forward import Forward, open_session
from edge_pc.models.spec import ModelSpec


class OnnxFull:
    """Full prefill at given settings, in a session of its own.

    Args:
        folder: the exported model.
        threads: compute threads.
        capacity: the longest prompt, in tokens.
    """

    def __init__(self, folder: Path, threads: int, capacity: int) -> None:
        spec = ModelSpec.load(folder)
        session = open_session(folder, threads=threads, provider="cpu", verbose=False)
        self._arena = Arena(kv_layout(spec, "float32"), capacity)
        self._forward = Forward(session, spec, self._arena)

    def prefill(self, token_ids: IntArray, chunk_tokens: int) -> Logits:
        """Compute all tokens, `chunk_tokens` at a time; logits of the last, float32 `[vocab]`."""
        self._arena.place((), exact=False)
        logits: Logits = np.empty(0, dtype=np.float32)
        for start in range(0, len(token_ids), chunk_tokens):
            positions = np.arange(start, min(start + chunk_tokens, len(token_ids)), dtype=np.int32)
            logits = self._forward(token_ids[positions], positions)
        return logits
