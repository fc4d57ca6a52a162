"""What is known of the llama.cpp backend before libllama is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_pc.backends.entry import BackendEntry
from edge_pc.checks import THREADS, check_number

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.llamacpp.backend import LlamaCppBackend
    from edge_pc.models.description import Description


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """How the llama.cpp backend runs. It runs on the CPU, and stores states in float16, as they are computed.

    Attributes:
        threads: compute threads; None: the CPUs this process may use.
        verbose: let the library log to stderr.

    Raises:
        OptionError: a value is wrong.
    """

    threads: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        check_number("threads", self.threads, THREADS)


def _open(model: Path, options: LlamaCppOptions) -> LlamaCppBackend:
    from edge_pc.backends.llamacpp.backend import LlamaCppBackend

    return LlamaCppBackend(model, options)


def _describe(model: Path) -> Description:
    from edge_pc.backends.llamacpp.describe import describe

    return describe(model)


def _probe() -> dict[str, str]:
    """Load libllama and let it name what it was built with."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    built_with = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    return {"version": llama_cpp.__version__, "built with": " ".join(built_with.split())}


ENTRY = BackendEntry(
    name="llamacpp",
    title="llama.cpp",
    model_kind="gguf",
    package="llama-cpp-python",
    import_name="llama_cpp",
    extra="llamacpp",
    options=LlamaCppOptions,
    open=_open,
    describe=_describe,
    probe=_probe,
    baseline="edge_pc.backends.llamacpp.baseline",
)
