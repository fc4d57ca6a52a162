"""What only the real model can tell: fidelity figures, the authors' schemas, and the way from files to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_pc import Engine, Sampling, Serving, schemas
from edge_pc.export import export

pytestmark = pytest.mark.real_model

REFERENCE = Path(__file__).parent.parent.parent / "shared" / "data" / "pml_reference"
SHORT = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(smollm2, cache_dir=tmp_path_factory.mktemp("states")) as engine:
        yield engine


ONE_MODULE = f"""<schema name="one"><system>Answer from the text.</system><user>
<module name="text">{"The tower of the old town is high, and its bell rings at noon. " * 30}</module></user></schema>"""
ASK_ONE = '<prompt schema="one"><text/><user>When does the bell ring?</user></prompt>'


@pytest.mark.parametrize("exact", [True, False])
def test_one_module_equals_full_prefill_exactly(engine: Engine, exact: bool) -> None:
    engine.load_schema(ONE_MODULE)
    assert engine.compare(ASK_ONE, Serving(fidelity="full" if exact else "fast")).max_abs_logit_diff == 0.0


def test_a_scaffold_equals_full_prefill_exactly(engine: Engine) -> None:
    members = "".join(f'<module name="{name}">{name} {"has a garden, and a dog. " * 40}</module>' for name in NAMES)
    engine.load_schema(
        f'<schema name="joint">Read this. <scaffold name="all">{members}</scaffold> Then answer.</schema>'
    )
    imports = "".join(f"<{name}/>" for name in NAMES)
    compared = engine.compare(f'<prompt schema="joint">{imports} Who has a dog?</prompt>', Serving(fidelity="full"))
    assert compared.max_abs_logit_diff == 0.0


NAMES = ("anna", "boris", "carla")
MANY = "".join(f'<module name="m{n}">Note {n}: {"the harbour opens at dawn. " * (3 + n)}</module>' for n in range(9))
NESTED = f'<schema name="many">{MANY}</schema>'
ASK_MANY = f'<prompt schema="many">{"".join(f"<m{n}/>" for n in range(9))} When does it open?</prompt>'


def slot_order_difference(engine: Engine) -> tuple[float, float, bool]:
    """Largest logit difference, KL and same first token of cells in slot order against cells in position order."""
    from contextlib import closing

    import numpy as np

    from edge_pc.runtime.compare import kl_divergence

    engine.load_schema(NESTED)
    prompt = engine.lay_out(ASK_MANY)
    states = [obtained.states for obtained in engine.encoder.obtain(prompt.encodings)]
    logits = []
    for exact in (True, False):
        with closing(engine.backend.new_context(prompt.tokens)) as context:
            logits.append(context.prefill(prompt.cached_plan(states, exact=exact)).logits)
    ordered, mapped = logits
    same = int(np.argmax(ordered)) == int(np.argmax(mapped))
    return float(np.abs(ordered - mapped).max()), kl_divergence(ordered, mapped), same


def test_slot_order_costs_little_with_8_bit_weights(smollm2: Path, tmp_path: Path) -> None:
    with Engine(smollm2, cache_dir=tmp_path, assembly="map") as engine:
        _, kl, same = slot_order_difference(engine)
    assert kl <= 0.002
    assert same


def test_slot_order_costs_nothing_with_32_bit_weights(smollm2_gguf: Path, tmp_path: Path) -> None:
    model = export(smollm2_gguf, tmp_path / "model", bits=32)
    with Engine(model, cache_dir=tmp_path / "states", assembly="map") as engine:
        difference, _, same = slot_order_difference(engine)
    assert difference <= 0.001
    assert same


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the authors' schemas are not at hand")
@pytest.mark.parametrize(
    ("file", "prompt"),
    [
        (
            "code_generation_bookstore.xml",
            '<prompt schema="code-generation-bookstore"><book.py/><user.py/><inventory.py/><store.py/><database.py/>'
            "<user>Create a main entry for the store.</user></prompt>",
        ),
        (
            "parameterized_prompts.xml",
            '<prompt schema="travel"><travel-plan duration="5 days"><overseas><tokyo/></overseas></travel-plan>'
            "<user>Where should I go first?</user></prompt>",
        ),
        (
            "persona_generation.xml",
            '<prompt schema="persona"><age><young-adult/></age><user>Introduce yourself.</user></prompt>',
        ),
    ],
)
def test_the_authors_schemas_serve_unchanged(engine: Engine, file: str, prompt: str) -> None:
    engine.load_schema(REFERENCE / file)
    fast = Serving(fidelity="fast", strict=True)
    first, second = engine.generate(prompt, SHORT, Serving(fidelity="fast")), engine.generate(prompt, SHORT, fast)
    assert first.token_ids == second.token_ids
    assert second.stats.cached_tokens > 0.8 * second.stats.prompt_tokens


@pytest.mark.parametrize("name", schemas.names())
def test_our_schemas_serve_their_prompts(engine: Engine, name: str) -> None:
    engine.load_schema(schemas.path(name))
    prompt = schemas.prompt_path(name).read_text(encoding="utf-8")
    assert engine.generate(prompt, SHORT).token_ids == engine.generate(prompt, SHORT, Serving(strict=True)).token_ids


def test_a_file_is_asked_about_twice(smollm2: Path, tmp_path: Path) -> None:
    text = Path(__file__).parent.parent / "docs" / "demo" / "hostel.md"
    answers = []
    for _ in range(2):  # as two processes: an engine each
        with Engine(smollm2, cache_dir=tmp_path) as engine:
            answers.append(engine.ask("How many beds does the hostel have?", [text], SHORT))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.cached_tokens == 0
    assert all(module.hit for module in answers[1].stats.modules)
    assert answers[1].stats.computed_tokens < 40
