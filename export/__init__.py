"""Makes models that take explicit position ids and past KV states, out of GGUF files and Hugging Face folders.

`export` is the one entry. A model is written into a temporary folder beside its place and renamed when it is whole, so
that an export that fails or is killed leaves nothing that looks like a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from edge_pc._version import __version__
from edge_pc.errors import ModelError, OptionError
from edge_pc.export.source import Source, read_source
from edge_pc.models.chat_template import TEMPLATE_FILE
from edge_pc.models.registry import SPEC_FILE
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import TOKENIZER_FILE
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.files import replacing_folder

Bits = Literal[4, 8, 32]

_QUANTIZATION = {4: "q4_block32", 8: "q8_block32", 32: "float32"}


def export(source: Path, out: Path, *, bits: Bits = 8, progress: OnProgress = ignore) -> Path:
    """Turn a llama-family model into an ONNX model with its tokenizer, chat template and spec.

    Args:
        source: a GGUF file, or a Hugging Face folder (`config.json`, safetensors, `tokenizer.json`).
        out: the folder to make. An exported model that is there is replaced; anything else is refused.
        bits: of the weights: 8 or 4 (block-quantized), or 32.
        progress: in parts of each step: `read`, `layers`, `fingerprint`.

    Returns:
        `out`, which then holds `model.onnx`, `model.onnx.data`, `tokenizer.json`, `edge_pc.json` and, if the model has
        one, `chat_template.jinja`.

    Raises:
        ModelError: the source is broken or not supported, or `out` is no exported model, or cannot be written.
        OptionError: `bits` is none of 4, 8, 32.
        MissingDependencyError: a Hugging Face folder is given, and the extra `export` is not installed.
    """
    if bits not in _QUANTIZATION:
        raise OptionError(f"bits is {bits}, expected one of 4, 8, 32")
    place = out.resolve()
    _check_replaceable(place)
    progress(Progress(0, 1, "read"))
    model = read_source(source)
    progress(Progress(1, 1, "read"))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(place) as folder:
            _write(model, folder, bits, progress)
    except OSError as exc:
        raise ModelError(
            f"{out} cannot be written: {exc.strerror or exc}",
            hint="can you write to the folder, and is there room? -o DIR chooses another one",
        ) from exc
    return out


def _write(model: Source, folder: Path, bits: Bits, progress: OnProgress) -> None:
    from edge_pc.export import graph

    graph.build(model.weights, folder, bits, progress)
    model.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
    if model.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(model.chat_template, encoding="utf-8", newline="")
    progress(Progress(0, 1, "fingerprint"))
    _spec(model, bits).save(folder)
    progress(Progress(1, 1, "fingerprint"))


def _spec(model: Source, bits: Bits) -> ModelSpec:
    return ModelSpec(
        **model.weights.config.sizes(),
        quantization=_QUANTIZATION[bits],
        bos_id=model.bos_id,
        eos_ids=model.eos_ids,
        special_tokens=model.special_tokens,
        exporter=f"edge-pc {__version__}",
    )


def _check_replaceable(out: Path) -> None:
    if not out.exists() or (out / SPEC_FILE).is_file():
        return
    if not out.is_dir():
        raise ModelError(f"{out} is a file, expected a folder to be made", hint="choose another folder with -o")
    if any(out.iterdir()):
        raise ModelError(
            f"{out} is not empty and not an exported model ({SPEC_FILE} is missing), so it is left alone",
            hint="choose another folder with -o",
        )
