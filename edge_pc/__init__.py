"""Edge Prompt Cache: answers long prompts almost at once on a CPU, by reusing the KV states of prompt modules.

    from edge_pc import Engine

    with Engine("smollm2") as engine:
        engine.load_schema("travel.xml")
        print(engine.generate('<prompt schema="travel"><tokyo/>Where can I see art?</prompt>').text)

All but errors is imported when it is first used, so that `import edge_pc` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edge_pc._version import __version__
from edge_pc.errors import (
    CacheMissError,
    ContextLengthError,
    EdgePCError,
    EngineError,
    MissingDependencyError,
    ModelError,
    OptionError,
    PMLError,
    StatesError,
    StoreError,
)

if TYPE_CHECKING:
    from edge_pc.documents import Document
    from edge_pc.engine import Engine
    from edge_pc.pml import Prompt, Schema
    from edge_pc.runtime.compare import Comparison
    from edge_pc.runtime.encoder import EncodeReport
    from edge_pc.runtime.sampling import Grammar, Sampling
    from edge_pc.runtime.serving import Serving
    from edge_pc.runtime.session import Session
    from edge_pc.runtime.stats import Result, Stats
    from edge_pc.runtime.stream import Stream

# Where a public name is defined whose module is not loaded yet.
_HOMES = {
    "Comparison": "runtime.compare",
    "Document": "documents",
    "EncodeReport": "runtime.encoder",
    "Engine": "engine",
    "Grammar": "runtime.sampling",
    "Prompt": "pml",
    "Result": "runtime.stats",
    "Sampling": "runtime.sampling",
    "Schema": "pml",
    "Serving": "runtime.serving",
    "Session": "runtime.session",
    "Stats": "runtime.stats",
    "Stream": "runtime.stream",
}

__all__ = [
    "CacheMissError",
    "Comparison",
    "ContextLengthError",
    "Document",
    "EdgePCError",
    "EncodeReport",
    "Engine",
    "EngineError",
    "Grammar",
    "MissingDependencyError",
    "ModelError",
    "OptionError",
    "PMLError",
    "Prompt",
    "Result",
    "Sampling",
    "Schema",
    "Serving",
    "Session",
    "StatesError",
    "Stats",
    "StoreError",
    "Stream",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"edge_pc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
