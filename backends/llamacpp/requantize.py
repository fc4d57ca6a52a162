"""Requantizes a GGUF file by libllama's own quantizer, for files whose quantization has no fast kernels."""

from __future__ import annotations

import ctypes
import os
from contextlib import closing
from pathlib import Path

from edge_pc.backends.llamacpp.library import load_library
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.backends.llamacpp.thread import NativeThread
from edge_pc.errors import ModelError, OptionError
from edge_pc.models.gguf_model import check_gguf
from edge_pc.system.cpu import allowed_cpus
from edge_pc.system.files import replacing_file

# llama.cpp's numbers of these file types (`llama_ftype`).
FILE_TYPES = {"q8_0": 7, "q4_0": 2}


def requantized_path(source: Path, quant: str) -> Path:
    """Where a requantized file lies unless another place is named: beside its source."""
    return source.with_name(f"{source.stem}-{quant}.gguf")


def requantize(source: Path, out: Path, quant: str) -> Path:
    """Write `source` with other weights to `out`, which is replaced only when the new file is whole.

    Args:
        source: a GGUF file of any quantization.
        out: the GGUF file to make.
        quant: `q8_0` (about as precise as the source allows) or `q4_0` (half the size, coarser).

    Returns:
        `out`.

    Raises:
        OptionError: `quant` is not known, or `out` is `source`.
        ModelError: the source is no GGUF file that libllama can read, or `out` cannot be written.
        MissingDependencyError: llama-cpp-python is not installed.
    """
    if quant not in FILE_TYPES:
        raise OptionError(f"quant is {quant!r}, expected one of {', '.join(FILE_TYPES)}")
    check_gguf(source)
    if out.exists() and out.samefile(source):
        raise OptionError(f"{out} is the file to be read", hint="write to another file")
    library = load_library()
    native_log.attach(library, verbose=False)
    params = library.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quant]
    params.allow_requantize = True
    params.nthread = allowed_cpus()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        native_log.take_error()
        with replacing_file(out) as file, closing(NativeThread()) as thread:
            names = os.fsencode(source), os.fsencode(file.name)
            if thread.run(lambda: library.llama_model_quantize(*names, ctypes.byref(params))):
                raise ModelError(
                    f"{source} cannot be requantized to {quant}: {native_log.take_error() or 'no reason was given'}",
                    hint="is it a whole GGUF file, and is there room on the disk?",
                )
    except OSError as exc:
        raise ModelError(f"{out} cannot be written: {exc}") from exc
    return out
