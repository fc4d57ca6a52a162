"""Loads libllama through llama-cpp-python's ctypes bindings; everything else here calls it by these."""

from __future__ import annotations

from types import ModuleType

from edge_pc.errors import MissingDependencyError

_INSTALL = 'pip install "edge-prompt-cache[llamacpp]"'
_FUNCTIONS = ("llama_memory_seq_cp", "llama_state_seq_set_data", "llama_model_is_hybrid", "llama_model_n_swa")
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
