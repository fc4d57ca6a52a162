"""Opening GGUF files: what is refused and why, what is logged, requantizing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import numpy as np
import pytest
import tiny
import xxhash

from edge_pc import Engine
from edge_pc.backends import open_backend
from edge_pc.backends.base import Plan
from edge_pc.backends.llamacpp.backend import LlamaCppBackend, check_composable
from edge_pc.backends.llamacpp.describe import describe
from edge_pc.backends.llamacpp.entry import LlamaCppOptions
from edge_pc.backends.llamacpp.library import model_params
from edge_pc.backends.llamacpp.requantize import requantize, requantized_path
from edge_pc.cli import main
from edge_pc.errors import MissingDependencyError, ModelError, OptionError
from edge_pc.models import registry

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

TOKENS = np.arange(10, 40, dtype=np.int32)
PLAN = Plan((), TOKENS, np.arange(30, dtype=np.int32))


def logits(path: Path) -> Any:
    backend = LlamaCppBackend(path)
    context = backend.new_context(30)
    found = context.prefill(PLAN).logits
    context.close()
    backend.close()
    return found


def library_of(**facts: Any) -> Any:
    """A library that says this of its model."""
    said = {"is_recurrent": False, "is_hybrid": False, "has_encoder": False, "is_diffusion": False, "rope_type": 0}
    said |= {"n_swa": 0, "n_ctx_train": 1024} | facts
    functions = {f"llama_model_{name}": lambda model, value=value: value for name, value in said.items()}
    return SimpleNamespace(
        **functions,
        LLAMA_ROPE_TYPE_NONE=-1,
        LLAMA_ROPE_TYPE_MROPE=8,
        LLAMA_ROPE_TYPE_IMROPE=40,
        LLAMA_ROPE_TYPE_VISION=24,
    )


@pytest.mark.parametrize(("amx", "repacks"), [("AMX_INT8 = 1 | ", False), ("", True)])
def test_amx_is_not_used_because_it_may_kill_the_process(amx: str, repacks: bool) -> None:
    library = SimpleNamespace(
        llama_model_default_params=lambda: SimpleNamespace(n_gpu_layers=-1, use_extra_bufts=True),
        llama_print_system_info=lambda: f"CPU : AVX2 = 1 | {amx}OPENMP = 1 | ".encode(),
    )
    params = model_params(library)
    assert (params.use_extra_bufts, params.n_gpu_layers) == (repacks, 0)


def test_a_file_is_hashed_once(tiny_gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, digest, hashed = tiny_gguf.read_bytes(), xxhash.xxh3_128_hexdigest, []

    def counted(data: Any) -> str:
        hashed.append(bytes(data[:]) == content)
        return digest(data)

    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", counted)
    first = logits(tiny_gguf)
    assert hashed.count(True) == 1, "opened for the first time"
    assert np.array_equal(logits(tiny_gguf), first)
    assert hashed.count(True) == 1, "opened again"


class TestRefused:
    @pytest.mark.parametrize(
        ("facts", "reason"),
        [
            ({"is_recurrent": True}, "recurrent"),
            ({"is_hybrid": True}, "hybrid"),
            ({"has_encoder": True}, "encoder"),
            ({"is_diffusion": True}, "diffusion"),
            ({"rope_type": 8}, "several dimensions"),
            ({"rope_type": -1}, "not encoded by rotation"),
            ({"n_swa": 512}, "512 tokens back"),
        ],
    )
    def test_caches_that_cannot_be_composed(self, facts: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelError, match=reason):
            check_composable(library_of(**facts), None, Path("model.gguf"))

    def test_a_window_as_long_as_the_model_is_none(self) -> None:
        check_composable(library_of(n_swa=1024), None, Path("model.gguf"))

    def test_a_real_file_with_a_sliding_window(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="32 tokens back"):
            LlamaCppBackend(write_gemma2(tmp_path / "gemma2.gguf", window=32))

    def test_what_would_end_the_process(self, tiny_gguf: Path, tmp_path: Path) -> None:
        path = tmp_path / "many.gguf"
        parts = mutations.parts_of(tiny_gguf)
        parts.set("llama.block_count", mutations.UINT32, 4097)
        path.write_bytes(parts.to_bytes())
        with pytest.raises(ModelError, match="block_count is 4097, expected a whole number from 1 to 512"):
            LlamaCppBackend(path)

    def test_broken_files(self, tiny_gguf: Path, tmp_path: Path) -> None:
        whole = tiny_gguf.read_bytes()
        for name, content in {"empty": b"", "text": b"not a model", "cut": whole[: len(whole) // 2]}.items():
            path = tmp_path / f"{name}.gguf"
            path.write_bytes(content)
            with pytest.raises(ModelError, match=name):
                LlamaCppBackend(path)
        with pytest.raises(ModelError, match="no such file"):
            LlamaCppBackend(tmp_path / "missing.gguf")

    @pytest.mark.parametrize("threads", [0, -1, True, 2.0, "4"])
    def test_threads(self, threads: Any) -> None:
        with pytest.raises(OptionError, match=rf"threads is {threads!r}, expected a whole number from 1 to 1024"):
            LlamaCppOptions(threads=threads)

    def test_options_of_another_backend(self, tiny_gguf: Path) -> None:
        with pytest.raises(OptionError, match=r"llamacpp has no option provider; it has: threads, verbose"):
            open_backend("llamacpp", tiny_gguf, {"provider": "cuda"})

    def test_without_the_extra(self, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llama_cpp", None)
        monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", None)
        with pytest.raises(MissingDependencyError, match=r"pip install .edge-prompt-cache\[llamacpp\]"):
            LlamaCppBackend(tiny_gguf)


class TestLog:
    PROGRAM = """
import sys
from pathlib import Path
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.entry import LlamaCppOptions
try:
    LlamaCppBackend(Path(sys.argv[1]), LlamaCppOptions(verbose=sys.argv[2] == "verbose")).close()
except Exception as error:
    print(error)
"""

    def run(self, path: Path, how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", self.PROGRAM, str(path), how]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=path.parent)

    def test_silent(self, tiny_gguf: Path) -> None:
        done = self.run(tiny_gguf, "quiet")
        assert (done.stdout, done.stderr) == ("", "")

    def test_verbose(self, tiny_gguf: Path) -> None:
        done = self.run(tiny_gguf, "verbose")
        assert done.stdout == ""
        assert "llama" in done.stderr

    def test_an_error_is_in_the_message_and_nowhere_else(self, tmp_path: Path) -> None:
        path = change_architecture(tiny.write_gguf(tmp_path / "other.gguf"), b"other")
        done = self.run(path, "quiet")
        assert done.stderr == ""
        assert "libllama cannot open" in done.stdout
        assert "no reason" not in done.stdout


class TestRequantize:
    @pytest.mark.parametrize(("quant", "tolerance"), [("q8_0", 0.5), ("q4_0", 10.0)])
    def test_it_computes_about_the_same(self, tiny_gguf: Path, tmp_path: Path, quant: str, tolerance: float) -> None:
        out = requantize(tiny_gguf, tmp_path / "new" / "model.gguf", quant)
        assert describe(out).spec.quantization == quant.upper()
        assert out.stat().st_size < tiny_gguf.stat().st_size
        assert 0 < np.abs(logits(out) - logits(tiny_gguf)).max() < tolerance
        assert [path.name for path in out.parent.iterdir()] == ["model.gguf"]

    def test_refused(self, tiny_gguf: Path, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="q8_0, q4_0"):
            requantize(tiny_gguf, tmp_path / "out.gguf", "q5_1")
        with pytest.raises(OptionError, match="the file to be read"):
            requantize(tiny_gguf, tiny_gguf, "q8_0")
        with pytest.raises(ModelError, match="no such file"):
            requantize(tmp_path / "none.gguf", tmp_path / "out.gguf", "q8_0")

    def test_a_failure_leaves_what_was_there(self, tiny_gguf: Path, tmp_path: Path) -> None:
        broken, out = tmp_path / "broken.gguf", tmp_path / "out.gguf"
        broken.write_bytes(tiny_gguf.read_bytes()[:20000])
        out.write_text("as before")
        with pytest.raises(ModelError, match=r"broken\.gguf is not a GGUF file that can be read, or it is truncated"):
            requantize(broken, out, "q8_0")
        change_architecture(tiny.write_gguf(broken), b"other")
        with pytest.raises(ModelError, match="cannot be requantized"):
            requantize(broken, out, "q8_0")
        assert out.read_text() == "as before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf", "out.gguf"]


class TestExportCommand:
    def test_a_requantized_file_can_be_used(self, tiny_gguf: Path, tmp_path: Path, capsys: Any) -> None:
        out = tmp_path / "model.gguf"
        command = ["export", str(tiny_gguf), "--backend", "llamacpp", "--quant", "q4_0", "-o", str(out)]
        assert main(command) == 0
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"--backend llamacpp --model {out}" in printed.err
        with Engine(out, backend="llamacpp", cache_dir=tmp_path) as engine:
            assert engine.spec.quantization == "Q4_0"

    def test_a_file_needs_a_place(self, tiny_gguf: Path, capsys: Any) -> None:
        assert main(["export", str(tiny_gguf), "--backend", "llamacpp"]) == 2
        assert "say where to write it: -o DIR" in capsys.readouterr().err

    def test_a_pulled_model_is_put_beside_itself_once(self, tiny_gguf: Path, home: Path, capsys: Any) -> None:
        pulled = registry.gguf_path("smollm2")
        pulled.parent.mkdir(parents=True)
        pulled.write_bytes(tiny_gguf.read_bytes())
        for says in ("is exported to", "is already exported", "is already exported"):
            assert main(["export", "smollm2", "--backend", "llamacpp"]) == 0
            assert says in capsys.readouterr().err
        assert describe(requantized_path(pulled, "q8_0")).spec.quantization == "Q8_0"
        assert main(["export", "smollm2", "--backend", "llamacpp", "--force"]) == 0
        assert "is exported to" in capsys.readouterr().err


def change_architecture(path: Path, name: bytes) -> Path:
    """Give a llama file another architecture's name."""
    parts = mutations.parts_of(path)
    parts.fields = [
        (key.replace(b"llama.", name + b"."), kind, name if key == b"general.architecture" else value)
        for key, kind, value in parts.fields
    ]
    path.write_bytes(parts.to_bytes())
    return path


def write_gemma2(path: Path, window: int) -> Path:
    """A tiny model of an architecture with a sliding window in every other layer."""
    import gguf

    model = tiny.TinyModel()
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_block_count(model.layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(window)
    tokens, merges = tiny.vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(tokens))
    writer.add_token_merges(list(merges))
    for name, array in tiny.tensors(model).items():
        writer.add_tensor(tiny.gguf_name(name), array)
    for layer in range(model.layers):
        for part in ("post_attention_norm", "post_ffw_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(model.hidden_size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
