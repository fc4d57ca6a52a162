"""llama.cpp on the real SmolLM2, in the quantizations that matter: exactness, and agreement with ONNX Runtime."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc import Engine
from edge_pc.backends.base import DecodeStep, KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.requantize import requantize
from edge_pc.compose.laid_out import LaidOut
from edge_pc.runtime.compare import kl_divergence

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed"),
]


@pytest.fixture(scope="module", params=["as pulled", "q8_0", "q4_0"])
def gguf(request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "as pulled":
        return smollm2_gguf
    return requantize(smollm2_gguf, tmp_path_factory.mktemp("quant") / f"{request.param}.gguf", request.param)


def test_one_module_equals_full_prefill(gguf: Path) -> None:
    """Also while another prompt goes on where the module ends; so do the answers' tokens."""
    text = np.random.default_rng(0).integers(1000, 40000, 160).astype(np.int32)
    positions = np.arange(160, dtype=np.int32)
    with closing(LlamaCppBackend(gguf)) as backend, closing(backend.new_context(160)) as context:

        def answered(plan: Plan) -> list[Any]:
            first, end = context.prefill(plan).logits, int(plan.position_ids[-1]) + 1
            later = [backend.decode([DecodeStep(context, int(text[p]), p)])[0] for p in (end, end + 1)]
            return [first, *later]

        array = context.encode(Plan((), text[:103], positions[:103], exact=True), positions[:103])
        module = KVStates("m", array, text[:103], positions[:103])
        with closing(backend.new_context(120)) as other:
            other.prefill(Plan((Span(module, 0, 103),), text[103:110], positions[103:110]))
            for stop in (150, 104, 103):
                stored = min(stop - 1, 103)
                wanted = answered(Plan((), text[:stop], positions[:stop]))
                found = answered(Plan((Span(module, 0, stored),), text[stored:stop], positions[stored:stop]))
                assert all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))


SCHEMA = """<schema name="trip">
  <system>You plan trips for people who are in a hurry.</system>
  <user>
    <module name="plan">Plan a trip of <param name="duration" len="8"/> for two people who like old towns.
      <union>
        <module name="rome">Rome is the capital of Italy. It is known for the Colosseum, the Forum and the Vatican.
          Summers are hot; spring and autumn are the best seasons.</module>
        <module name="oslo">Oslo is the capital of Norway.</module>
      </union>
    </module>
    <module name="budget">They have 500 euros, and want to travel by train.</module>
  </user>
</schema>"""
PROMPTS = (
    '<prompt schema="trip"><plan duration="three days"><rome/></plan><user>Where should they go?</user></prompt>',
    '<prompt schema="trip"><budget/><user>What is the capital of Norway?</user></prompt>',
    '<prompt schema="trip"><plan duration="a week"><oslo/></plan><budget/><user>What will it cost?</user></prompt>',
)


def test_it_agrees_with_onnx_runtime(smollm2: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    opened = [Engine(smollm2, cache_dir=tmp_path), Engine(smollm2_gguf, backend="llamacpp", cache_dir=tmp_path)]
    try:
        for engine in opened:
            engine.load_schema(SCHEMA)
        for prompt in PROMPTS:
            (onnx, onnx_logits), (llama, llama_logits) = (first_logits(engine, prompt) for engine in opened)
            assert np.array_equal(onnx.in_position_order(), llama.in_position_order())
            assert np.array_equal(onnx.position_ids, llama.position_ids)
            assert np.argmax(onnx_logits) == np.argmax(llama_logits)
            assert kl_divergence(onnx_logits, llama_logits) < 0.02
    finally:
        for engine in opened:
            engine.close()


def first_logits(engine: Engine, prompt: str) -> tuple[LaidOut, Any]:
    layout = engine.lay_out(prompt)
    plan = layout.cached_plan([obtained.states for obtained in engine.encoder.obtain(layout.encodings)], exact=False)
    with closing(engine.backend.new_context(layout.tokens)) as context:
        return layout, context.prefill(plan).logits
