"""Exported 32-bit graphs give the logits of transformers' own llama, gaps in the positions included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray
from tiny import TinyModel

from edge_pc.export import export

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": TinyModel(),
    "untied": TinyModel(tied_embeddings=False, seed=1),
    "head_dim 64, attention wider than the model": TinyModel(head_dim=64, heads=2, kv_heads=1, seed=2),
    "no sharing of heads, rope base": TinyModel(heads=4, kv_heads=4, rope_base=500000.0, seed=3),
    "linear scaling": TinyModel(rope_scaling={"rope_type": "linear", "factor": 4.0}, seed=4),
    "llama3 scaling": TinyModel(rope_scaling=LLAMA3, seed=5),
}
CAPACITY = 64


class Graph:
    """The exported graph with an arena, driven directly."""

    def __init__(self, folder: Path, model: TinyModel) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        shape = (1, model.kv_heads, CAPACITY, model.head_dim)
        parts = [f"{layer}.{part}" for layer in range(model.layers) for part in ("key", "value")]
        self.arena = {f"past_key_values.{part}": np.zeros(shape, np.float32) for part in parts}
        self.present = [f"present.{part}" for part in parts]
        self.cells: list[int] = []

    def forward(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens after the cells that are there; logits of the last token."""
        self.cells += positions
        hidden = np.array(self.cells)[None, :] > np.array(positions)[:, None]
        feeds: dict[str, Any] = {
            "input_ids": np.array([ids], np.int64),
            "position_ids": np.array([positions], np.int64),
            "seqlens_k": np.array([len(self.cells) - 1], np.int32),
            "total_sequence_length": np.array(len(self.cells), np.int32),
            "biased": np.array(True),
            "attention_bias": np.where(hidden, np.float32(-1e9), np.float32(0))[None, None],
        }
        logits, *present = self.session.run(["logits", *self.present], {**feeds, **self.arena})
        self.arena = dict(zip(self.arena, present, strict=True))
        return np.asarray(logits[0], np.float32)


def reference(hf: Any, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """transformers' logits of all tokens; each sees the tokens given before it whose position is not larger."""
    import torch

    order = torch.tensor(positions)
    hidden = (order[None, :] > order[:, None]) | torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    mask = torch.zeros(len(ids), len(ids)).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        out = hf(torch.tensor([ids]), attention_mask=mask[None, None], position_ids=order[None], use_cache=False)
    return np.asarray(out.logits[0].numpy(), np.float32)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Graph, Any]:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = request.param
    folder = tiny.write_hf(tmp_path / "hf", model)
    hf = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
    return Graph(export(folder, tmp_path / "onnx", bits=32), model), hf


def test_logits_equal_transformers(pair: tuple[Graph, Any]) -> None:
    graph, hf = pair
    ids = np.random.default_rng(7).integers(4, 290, 24).tolist()
    # Contiguous; a gap inside a run; runs with gaps between them; and a run that belongs before present cells.
    positions = [0, 1, 2, 3, *range(40, 46), *range(500, 508), *range(20, 26)]
    expected = reference(hf, ids, positions)
    for start, stop in ((0, 4), (4, 10), (10, 11), (11, 18), (18, 24)):
        got = graph.forward(ids[start:stop], positions[start:stop])
        np.testing.assert_allclose(got, expected[stop - 1], atol=1e-4, rtol=0)


def test_a_first_run_with_a_gap_inside(pair: tuple[Graph, Any]) -> None:
    graph, hf = pair
    ids, positions = [10, 50, 90, 130, 170], [3, 4, 100, 101, 900]
    np.testing.assert_allclose(graph.forward(ids, positions), reference(hf, ids, positions)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["plain", "untied", "no sharing of heads, rope base", "linear scaling"])
def test_a_gguf_gives_the_logits_of_the_hugging_face_folder(name: str, tmp_path: Path) -> None:
    model = VARIANTS[name]
    sources = tiny.write_gguf(tmp_path / "tiny.gguf", model), tiny.write_hf(tmp_path / "hf", model)
    ids, positions = [10, 50, 90, 130, 170], [0, 1, 2, 30, 31]
    one, other = (
        Graph(export(source, tmp_path / f"{source.name}.onnx", bits=32), model).forward(ids, positions)
        for source in sources
    )
    np.testing.assert_allclose(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["plain", "untied", "linear scaling"])
def test_a_gguf_gives_the_logits_of_llama_cpp(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = VARIANTS[name]
    path = tiny.write_gguf(tmp_path / "tiny.gguf", model)
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False)
    ids = [10, 50, 90, 130, 170, 200, 210]
    llama.eval(ids)
    got = Graph(export(path, tmp_path / "onnx", bits=32), model).forward(ids, list(range(len(ids))))
    # llama.cpp keeps keys and values in float16.
    np.testing.assert_allclose(got, llama.scores[len(ids) - 1], atol=0.03, rtol=0)
    llama.close()
