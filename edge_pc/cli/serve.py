"""`edge-pc serve`: OpenAI's API and a page, on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from edge_pc.checks import Range
from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    option,
    output_options,
    reads,
)
from edge_pc.cli.output import Output
from edge_pc.cli.values import PATH, number
from edge_pc.errors import MissingDependencyError
from edge_pc.system.sizes import parse_size

_LIMITS = "Limits"


@click.command(cls=GroupedCommand)
@option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0: on all networks.")
@option(
    "--port", type=number(Range(int, 0, 65535)), metavar="N", default=8000, show_default=True, help="0: a free one."
)
@option(
    "--schema",
    "schemas",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="A schema that requests may name. Repeatable.",
)
@option("--api-key", metavar="KEY", help="Requests must send this key.  [default: none]")
@option(
    "--parallel",
    group=_LIMITS,
    type=number(Range(int, 1, 64)),
    metavar="N",
    default=4,
    show_default=True,
    help="Answers that are computed together.",
)
@option(
    "--queue",
    group=_LIMITS,
    type=number(Range(int, 1, 10000)),
    metavar="N",
    default=64,
    show_default=True,
    help="Requests that may wait; more are refused with status 429.",
)
@option(
    "--keep-contexts",
    group=_LIMITS,
    type=number(Range(int, 0, 64)),
    metavar="N",
    default=4,
    show_default=True,
    help="Conversations that stay in memory, so that only their new messages are computed.",
)
@option(
    "--max-body",
    group=_LIMITS,
    callback=reads(parse_size),
    metavar="SIZE",
    default="8MiB",
    show_default=True,
    help="The largest request.",
)
@option(
    "--timeout",
    group=_LIMITS,
    type=number(Range(float, 1, 86400)),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="From a request to the end of its answer.",
)
@output_options
@engine_options
def serve(
    host: str,
    port: int,
    schemas: tuple[str, ...],
    api_key: str | None,
    parallel: int,
    queue: int,
    keep_contexts: int,
    max_body: int,
    timeout: float,
    output: OutputOptions,
    engine_options: EngineOptions,
) -> None:
    """Serve OpenAI's API, and a page for people, until Ctrl-C.

    \b
    edge-pc serve
    edge-pc serve --schema trip.xml --port 8080
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as exc:
        raise MissingDependencyError(f"serve needs {exc.name}", hint='pip install "edge-prompt-cache[serve]"') from exc
    from edge_pc.server.app import Limits, Server
    from edge_pc.server.running import is_local, listen, uvicorn_of

    out = Output(output)
    limits = Limits(parallel, queue, keep_contexts, max_body, timeout)
    with listen(host, port) as listening:
        engine, _ = open_engine(engine_options, out)
        with engine:
            for schema in schemas:
                engine.load_schema(Path(schema))
            model = Path(engine_options.model).name
            server = Server(engine, model, limits=limits, local=is_local(host), key=api_key)
            shown = f"[{host}]" if ":" in host else host
            out.note(f"{model} is served at http://{shown}:{listening.getsockname()[1]} (Ctrl-C ends)")
            try:
                uvicorn_of(server).run(sockets=[listening])
            finally:
                server.close()
