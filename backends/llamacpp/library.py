"""Loads libllama through llama-cpp-python's ctypes bindings; everything else here calls it by these."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from edge_pc.errors import MissingDependencyError

_INSTALL = 'pip install "edge-prompt-cache[llamacpp]"'
_FUNCTIONS = ("llama_memory_seq_cp", "llama_state_seq_set_data", "llama_model_is_hybrid", "llama_model_n_swa")
AMX_FLAG = "AMX_INT8 = 1"  # of libllama's system information
_CONTEXT_FIELDS = frozenset({"flash_attn_type", "kv_unified", "n_outputs_max"})


def load_library() -> ModuleType:
    """The bindings' module of C functions (`llama_cpp.llama_cpp`), the library initialised.

    Raises:
        MissingDependencyError: the extra is not installed, its library does not load, or it is too old.
    """
    try:
        import llama_cpp.llama_cpp as library
    except ImportError as exc:
        raise MissingDependencyError(
            f"the llama.cpp backend needs llama-cpp-python, which cannot be imported: {exc}", hint=_INSTALL
        ) from exc
    except (OSError, RuntimeError) as exc:
        raise MissingDependencyError(
            f"libllama cannot be loaded: {exc}", hint=f"build it again: {_INSTALL} --force-reinstall --no-cache-dir"
        ) from exc
    fields = {name for name, *_ in library.llama_context_params._fields_}
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)] + sorted(_CONTEXT_FIELDS - fields)
    if missing:
        raise MissingDependencyError(
            f"this llama-cpp-python is too old: {', '.join(missing)} is missing", hint=f"{_INSTALL} --upgrade"
        )
    library.llama_backend_init()
    return library


def model_params(library: ModuleType) -> Any:
    """What a model is opened with (`llama_model_params`): on the CPU, and not with AMX.

    Where libllama was built with AMX it repacks weights for it, and the first run over them may crash on an illegal
    instruction: its threads lack Linux's permission, or the compiler dropped the configuration of the tiles (llama.cpp
    pull request 26954). All repacking ("extra buffers") is switched off there, since libllama has no finer switch.
    """
    params = library.llama_model_default_params()
    params.n_gpu_layers = 0
    if AMX_FLAG in library.llama_print_system_info().decode("utf-8", errors="replace"):
        params.use_extra_bufts = False
    return params
