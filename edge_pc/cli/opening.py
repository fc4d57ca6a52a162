"""From options to an opened engine, and from an engine's work to what a person sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_pc.cli.clock import process_age_ms
from edge_pc.cli.getting import make_ready

if TYPE_CHECKING:
    from edge_pc.cli.options import EngineOptions
    from edge_pc.cli.output import Output
    from edge_pc.engine import Engine


@dataclass(frozen=True, slots=True)
class StartUp:
    """Milliseconds that went by before there was an engine.

    Attributes:
        import_ms: from the start of the process until everything was imported.
        load_ms: opening the model.
    """

    import_ms: float
    load_ms: float


def open_engine(options: EngineOptions, output: Output) -> tuple[Engine, StartUp]:
    """Open the engine that the options describe; on first use its model is downloaded and exported.

    Its caller closes it.
    """
    from edge_pc.engine import Engine

    make_ready(options.model, options.backend, output)
    imported = process_age_ms()
    engine = Engine(
        options.model,
        backend=options.backend,
        cache_dir=options.cache_dir,
        encoding=options.encoding,
        tail=options.tail,
        max_store_bytes=options.max_cache_size,
        verbose=output.verbose > 1,
        **options.own,
    )
    return engine, StartUp(imported, process_age_ms() - imported)
