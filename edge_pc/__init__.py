"""Edge Prompt Cache: answers long prompts almost at once on a CPU, by reusing the KV states of prompt modules.

    from edge_pc import Engine

    with Engine("smollm2") as engine:
        engine.load_schema("travel.xml")
        print(engine.generate('<prompt schema="travel"><tokyo/>Where can I see art?</prompt>').text)

Names are imported when they are first used, so that `import edge_pc` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edge_pc._version import __version__

if TYPE_CHECKING:
    from edge_pc.engine import Engine
    from edge_pc.errors import (
        CacheMissError,
        ContextLengthError,
        EdgePCError,
        MissingDependencyError,
        ModelError,
        OptionError,
        PMLError,
        StatesError,
        StoreError,
    )
    from edge_pc.runtime.prefill import Serving
    from edge_pc.runtime.sampling import Sampling
    from edge_pc.runtime.stats import Result, Stats

__all__ = [
    "CacheMissError",
    "ContextLengthError",
    "EdgePCError",
    "Engine",
    "MissingDependencyError",
    "ModelError",
    "OptionError",
    "PMLError",
    "Result",
    "Sampling",
    "Serving",
    "StatesError",
    "Stats",
    "StoreError",
    "__version__",
]

_HOMES = {
    "Engine": "engine",
    "Result": "runtime.stats",
    "Sampling": "runtime.sampling",
    "Serving": "runtime.prefill",
    "Stats": "runtime.stats",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"edge_pc.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
