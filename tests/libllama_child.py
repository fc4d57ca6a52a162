"""Run as a child process: opens the GGUF files named on stdin as the llama.cpp backend does, and computes with them.

For each line one line is printed: `ok`, or `refused` and the error. A process that ends says by it that libllama took
it down.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.backends.llamacpp.describe import check
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.errors import EdgePCError, ModelError

TOKENS = 30


def main() -> None:
    library = load_library()
    native_log.attach(library, verbose=False)
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        try:
            compute(library, path)
            said = "ok"
        except EdgePCError as exc:
            said = f"refused {exc.message}"
        print(said.replace("\n", " "), flush=True)


def compute(library: Any, path: Path) -> None:
    """A prefill of a few tokens by libllama alone, so that whatever it trusts in a file is used."""
    checked = check(path)
    model = library.llama_model_load_from_file(os.fsencode(path), model_params(library))
    if not model:
        raise ModelError(f"libllama cannot open {path}")
    checked.describe().tokenizer.encode("the user and 12\n")  # before a context is made, as in the backend
    params = library.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 64, 1, 1
    context = library.llama_init_from_model(model, params)
    if not context:
        raise ModelError("libllama cannot make a context")
    tokens = np.arange(10, 10 + TOKENS, dtype=np.int32)
    pointer = tokens.ctypes.data_as(dict(library.llama_batch._fields_)["token"])
    if library.llama_decode(context, library.llama_batch_get_one(pointer, TOKENS)):
        raise ModelError("libllama cannot compute")
    library.llama_free(context)
    library.llama_model_free(model)


if __name__ == "__main__":
    main()
