"""Model files from strangers: whatever is in them, an export and libllama either use it or say what is wrong."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import libllama_child
import mutations
import pytest
import tiny
from mutations import ARRAY, FLOAT32, INT8, INT32, STRING, UINT32, GGUFParts

from edge_pc.errors import EdgePCError, ModelError
from edge_pc.export import export
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.gguf_model import check_gguf

Change = Callable[[GGUFParts], None]

# Far above what one takes (20 ms), far below what a person takes for a hang.
PATIENCE_SECONDS = 60
# What the tiny model exports to, times ten.
MOST_BYTES = 10_000_000
# 800 of each kind were run once; these are kept.
SEEDS = 150


def changed(source: Path, target: Path, change: Change) -> Path:
    parts = mutations.parts_of(source)
    change(parts)
    target.write_bytes(parts.to_bytes())
    return target


def field(key: str, kind: int, value: object) -> Change:
    return lambda parts: parts.set(key, kind, value)


def tensor(at: int, name: bytes | None = None, **other: int | list[int]) -> Change:
    """Change the name, `dims`, `kind` or `offset` of a tensor."""

    def change(parts: GGUFParts) -> None:
        old_name, dims, kind, offset = parts.tensors[at]
        new = {"dims": dims, "kind": kind, "offset": offset} | other
        parts.tensors[at] = (old_name if name is None else name, new["dims"], new["kind"], new["offset"])

    return change


def counts(**numbers: int) -> Change:
    return lambda parts: parts.counts.update(numbers)


def twice(parts: GGUFParts) -> None:
    parts.fields.append(parts.fields[0])


def repeated_token(parts: GGUFParts) -> None:
    tokens, _ = tiny.vocabulary()
    parts.set("tokenizer.ggml.tokens", ARRAY, (STRING, [b"same"] * 2 + [token.encode() for token in tokens[2:]]))


KINDS = [1] * len(tiny.vocabulary()[0])
HOSTILE = {
    "version": (lambda parts: setattr(parts, "version", 1), "the version is 1, expected one of 2, 3"),
    "other byte order": (lambda parts: setattr(parts, "version", 3 << 24), "machines of the other byte order"),
    "many tensors": (counts(tensors=2**63), "the number of tensors at byte 8 is 9223372036854775808, expected at most"),
    "many fields": (counts(fields=2**40), "the number of fields at byte 16 is 1099511627776, expected at most"),
    "fields beyond the end": (counts(fields=60000), "goes beyond the end|unknown kind"),
    "field twice": (twice, "appears twice"),
    "kind": (field("general.name", 13, b""), "'general.name' is of the unknown kind 13"),
    "array of arrays": (field("a", ARRAY, (ARRAY, [(UINT32, [1])])), "'a' has items of the unknown kind 9"),
    "not UTF-8": (field("general.name", STRING, b"\xff"), "metadata 'general.name' at byte .* is not UTF-8"),
    "alignment": (field("general.alignment", UINT32, 0), "general.alignment is 0, expected a power of two"),
    "alignment for libllama": (field("general.alignment", UINT32, 1), r"starts at byte \d+, expected a multiple of 32"),
    "no dimensions": (tensor(0, dims=[]), "has 0 dimensions, expected 1 to 4"),
    "zero values": (tensor(0, dims=[0, 4]), r"has the dimensions \(0, 4\)"),
    "half a block": (tensor(1, dims=[33], kind=8), r"has the dimensions \(33,\), expected rows of whole blocks of 32"),
    "huge": (tensor(0, dims=[2**40, 2**20]), "tensor 'token_embd.weight' ends at byte"),
    "outside": (tensor(0, offset=2**40), "tensor 'token_embd.weight' ends at byte"),
    "crooked": (tensor(0, offset=1), "starts at 1, expected a multiple of 32"),
    "type": (tensor(0, kind=99), "has the unknown type 99"),
    "no weights": (tensor(0, kind=26), "'token_embd.weight' has the type I32, expected a type for weights"),
    "norm": (tensor(1, kind=24), "has the type I8, expected F32"),
    "name": (tensor(0, name=b"x" * 65), "longer than 64 bytes"),
    "architecture": (field("general.architecture", UINT32, 1), "general.architecture is 1, expected text"),
    "layers": (field("llama.block_count", UINT32, 4097), "block_count is 4097, expected a whole number from 1 to 512"),
    "layers as text": (field("llama.block_count", STRING, b"2"), "block_count is '2', expected a whole number"),
    "no layers": (field("llama.block_count", UINT32, 0), "block_count is 0, expected a whole number from 1 to 512"),
    "epsilon": (field("llama.attention.layer_norm_rms_epsilon", FLOAT32, -1), r"epsilon is -1\.0, expected a number"),
    "not a number": (field("llama.attention.scale", FLOAT32, float("nan")), "scale is nan, expected a number"),
    "experts": (field("llama.expert_group_count", UINT32, 4), "0 of 4 groups of them, are used at a time"),
    "extra layers": (field("llama.nextn_predict_layers", UINT32, 2), "nextn_predict_layers is 2, expected less than 2"),
    "token twice": (repeated_token, "token 'same' is in the vocabulary 2 times"),
    "few types": (field("tokenizer.ggml.token_type", ARRAY, (INT32, [1])), "token_type has 1 items, expected one for"),
    "short types": (field("tokenizer.ggml.token_type", ARRAY, (INT8, KINDS)), "token_type has numbers of another kind"),
    "scores": (field("tokenizer.ggml.scores", ARRAY, (INT32, KINDS)), "scores has numbers of another kind"),
    "tokens": (field("tokenizer.ggml.tokens", ARRAY, (INT32, KINDS)), "tokens is .*, expected a list whose items are"),
    "end": (
        field("tokenizer.ggml.eos_token_id", UINT32, 4000),
        "eos_token_id is 4000, expected one of the 309 tokens'",
    ),
    "template": (field("tokenizer.chat_template", UINT32, 2), "tokenizer.chat_template is 2, expected text"),
    "pieces": (field("split.count", UINT32, 3), "is one of 3 pieces of a split model"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_a_gguf_file_must_not_hold(change: Change, message: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path = changed(tiny_gguf, tmp_path / "hostile.gguf", change)
    with pytest.raises(ModelError, match=rf"(?s)hostile\.gguf.*(?:{message})"):
        check_gguf(path)


def test_a_whole_file_is_read_as_the_library_reads_it(tiny_gguf: Path) -> None:
    import gguf

    file, library = check_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    expected = {key: found.contents() for key, found in library.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [tensor.name for tensor in library.tensors]
    for tensor in library.tensors:
        assert file.load(tensor.name).tobytes() == tensor.data.tobytes()


def test_ids_that_mean_no_token(tiny_gguf: Path, tmp_path: Path) -> None:
    from edge_pc.models.gguf_model import tokenizer_fields

    path = changed(tiny_gguf, tmp_path / "a.gguf", field("tokenizer.ggml.padding_token_id", UINT32, 2**32 - 1))
    assert tokenizer_fields(check_gguf(path))["padding_token_id"] is None


def test_a_file_cut_anywhere_in_its_header(tiny_gguf: Path, tmp_path: Path) -> None:
    whole, cut = tiny_gguf.read_bytes(), tmp_path / "cut.gguf"
    for length in range(0, 9000, 97):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf is not a GGUF file that can be read, or it is truncated"):
            GGUFFile(cut)


# Mutations


@pytest.fixture
def impatient() -> Iterator[None]:
    """Ends a test that hangs."""
    import faulthandler

    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def check_outcome(source: Path, out: Path, what: str) -> None:
    """An export either succeeds, with a model of a usual size, or says in short what is wrong."""
    print(what)  # shown when another exception ends the test
    try:
        export(source, out, bits=32)
    except EdgePCError as exc:
        said = str(exc)
    else:
        said = ""
    assert len(said) < 1000
    assert out.exists() != bool(said)
    if not said:
        assert sum(path.stat().st_size for path in out.iterdir()) < MOST_BYTES
        shutil.rmtree(out)


@pytest.mark.usefixtures("impatient")
def test_mutated_gguf_files(tiny_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "mutated.gguf"
    for seed in range(SEEDS):
        done, content = mutations.mutate_gguf(tiny_gguf, seed)
        source.write_bytes(content)
        check_outcome(source, tmp_path / "out", f"seed {seed}: {done}")


@pytest.mark.usefixtures("impatient")
def test_mutated_hugging_face_folders(tiny_hf: Path, tmp_path: Path) -> None:
    source = tmp_path / "mutated"
    for seed in range(SEEDS):
        done = mutations.mutate_folder(tiny_hf, source, seed)
        check_outcome(source, tmp_path / "out", f"seed {seed}: {done}")
        shutil.rmtree(source)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
def test_mutated_gguf_files_in_libllama(tiny_gguf: Path, tmp_path: Path) -> None:
    source, outcomes = tmp_path / "mutated.gguf", []
    command = [sys.executable, libllama_child.__file__]
    # libllama would start a debugger to print where it ended.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True) as child:
        assert child.stdin
        assert child.stdout
        try:
            for seed in range(SEEDS):
                done, content = mutations.mutate_gguf(tiny_gguf, seed)
                source.write_bytes(content)
                print(source, file=child.stdin, flush=True)
                answered, _, _ = select.select([child.stdout], [], [], PATIENCE_SECONDS)
                said = child.stdout.readline() if answered else "nothing for a minute"
                assert said.split(" ")[0].strip() in ("ok", "refused"), f"seed {seed}: {done}: {said!r}"
                outcomes.append(said.split(" ")[0].strip())
        finally:
            child.kill()
    assert set(outcomes) == {"ok", "refused"}
