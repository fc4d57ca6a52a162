"""The command `edge-pc`.

Every way out of it is here: an answer (0), wrong input (2), an environment that lacks something (3), Ctrl-C (130), a
reader that went away (141, as the shell reports SIGPIPE), a fault of our own (1). Commands are imported when they are
called, and import what is heavy when they run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from edge_pc._version import __version__
from edge_pc.cli.clock import process_age_ms as process_age_ms  # imported first: it notes when the process started
from edge_pc.errors import EdgePCError

FAULT = 1
WRONG_INPUT = 2
ENVIRONMENT_LACKS = 3
INTERRUPTED = 130
READER_GONE = 141

# In the order of a newcomer's needs.
_COMMANDS = {
    "ask": "ask:ask",
    "run": "run:run",
    "encode": "encode:encode",
    "schema": "schema:schema",
    "cache": "cache:cache",
    "pull": "models:pull",
    "export": "models:export",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
    "completion": "completion:completion",
}

EPILOG = """Every option can be set by a variable: EDGE_PC_MAX_TOKENS is --max-tokens. The command line wins.

Exit codes: 0 done, 1 a fault of edge-pc, 2 wrong input, 3 the environment lacks something, 130 interrupted."""


class LazyGroup(click.Group):
    """The group of all commands, each imported when it is needed."""

    def invoke(self, ctx: click.Context) -> Any:
        # Click's own ways out would write an empty line, and exit with 1.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            return _interrupted()
        except BrokenPipeError:
            return _reader_gone()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"edge_pc.cli.{module}"), name)
        return command


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", prog_name="edge-pc", message="%(prog)s %(version)s")
def cli() -> None:
    """Answers long prompts almost at once, by reusing what was computed for their parts.

    \b
    Start with:
      edge-pc pull smollm2
      edge-pc export smollm2
      edge-pc ask "What is this about?" FILE...
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `edge-pc` and return its exit code."""
    from edge_pc.cli.output import prepare_streams

    prepare_streams()
    try:
        # Click returns the exit code of --help and --version, and a command's own result.
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="edge-pc", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except BrokenPipeError:
        return _reader_gone()
    except Exception as exc:
        return _failed(exc)


def _interrupted() -> int:
    # A person at a terminal has half a line before this, of the answer or ^C.
    sys.stderr.write(("\n" if sys.stderr.isatty() else "") + "interrupted\n")
    return INTERRUPTED


def _reader_gone() -> int:
    # The interpreter flushes stdout once more on its way out.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _failed(exc: Exception) -> int:
    """Say what went wrong, with a traceback for -vv, and return the exit code."""
    from edge_pc.cli.output import say_error

    if _wants_traceback():
        import traceback

        traceback.print_exception(exc)
    if isinstance(exc, click.ClickException):
        context = getattr(exc, "ctx", None)
        say_error(exc.format_message(), f"{context.command_path} --help lists what it takes" if context else None)
        return WRONG_INPUT
    if isinstance(exc, EdgePCError):
        say_error(exc.message, exc.hint)
        return exc.exit_code
    library = (exc.name or "").partition(".")[0] if isinstance(exc, ModuleNotFoundError) else ""
    if library and library != "edge_pc":
        say_error(
            f"the library {library} is not installed", "install edge-prompt-cache again; edge-pc doctor says more"
        )
        return ENVIRONMENT_LACKS
    say_error(f"unexpected {type(exc).__name__}: {exc}", "this is a fault of edge-pc; run again with -vv to see where")
    return FAULT


def _wants_traceback() -> bool:
    """The command's own -vv: an `Output` was made with it, and set the log's level."""
    import logging

    return logging.getLogger("edge_pc").level == logging.DEBUG
