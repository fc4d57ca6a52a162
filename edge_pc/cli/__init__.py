"""The command `edge-pc`.

Every way out of it is here: an answer (0), wrong input (2), an environment that lacks something (3), Ctrl-C (130), a
reader that went away (141, as shells report SIGPIPE), a bug (1). A command is imported when it is called,
and imports what is heavy when it runs.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from edge_pc._version import __version__
from edge_pc.cli.clock import process_age_ms as process_age_ms  # imported first: it notes when the process started
from edge_pc.cli.streams import give_up_stdout, prepare_streams, say, say_error, why
from edge_pc.errors import EdgePCError

FAULT = 1
WRONG_INPUT = 2
ENVIRONMENT_LACKS = 3
INTERRUPTED = 130
READER_GONE = 141

# Name → (module, first line of its help), in the order in which a newcomer needs them. The line stands here too, so
# that `--help` imports no command.
_COMMANDS = {
    "ask": ("ask", "Answer a question about documents."),
    "add": ("add", "Prepare files, so that a question about them computes only itself."),
    "watch": ("add", "Keep a folder prepared (see `add`): files are computed again when they change."),
    "run": ("run", "Answer a PML prompt against its schema."),
    "serve": ("serve", "Serve OpenAI's API, and a page for people, until Ctrl-C."),
    "encode": ("encode", "Compute the states of a schema's modules and store them."),
    "schema": ("schema", "Check a schema, or show its modules, positions and lengths."),
    "cache": ("cache", "Look at the stored KV states, check them, remove them."),
    "pull": ("models", "Download a model by its name: smollm2, or one of the Hugging Face Hub."),
    "models": ("models", "List the models on this machine, and those that can be pulled."),
    "export": ("models", "Make a model ready to run."),
    "doctor": ("doctor", "Check that this machine and this environment can run edge-pc."),
    "bench": ("bench", "Measure what reuse gives on this machine, and compare machines."),
    "completion": ("completion", "Print a shell's completion script."),
}

EPILOG = """Every option can also be set by a variable: EDGE_PC_MAX_TOKENS sets --max-tokens. The command line wins.
EDGE_PC_HOME sets the folder that models and states are kept in.

Exit codes: 0 done, 1 a bug in edge-pc, 2 wrong input, 3 something that edge-pc needs is missing or full, 130
interrupted, 141 the reader of stdout went away."""


@contextmanager
def own_ways_out() -> Iterator[None]:
    """Click would write an empty line for Ctrl-C, and exit with 1 for a reader that went away."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(_interrupted()) from None
    except BrokenPipeError:
        raise click.exceptions.Exit(_reader_gone()) from None


class LazyGroup(click.Group):
    """The group of all commands, each imported when it is needed."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with own_ways_out():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with own_ways_out():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"edge_pc.cli.{module}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in _COMMANDS.items()])


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


def main(arguments: Sequence[str] | None = None, *, group: click.Group = cli, name: str = "edge-pc") -> int:
    """Run `edge-pc`, or another group of commands under its name, and return its exit code."""
    prepare_streams()
    try:
        # Click returns the exit code of --help and --version, and a command's own result.
        words = None if arguments is None else list(arguments)
        code = group.main(args=words, prog_name=name, standalone_mode=False)
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
    say(("\n" if sys.stderr.isatty() else "") + "interrupted\n")
    return INTERRUPTED


def _reader_gone() -> int:
    give_up_stdout()
    return READER_GONE


def _failed(exc: Exception) -> int:
    """Say what went wrong, with a traceback for -vv, and return the exit code."""
    if _wants_traceback():
        import traceback

        say("".join(traceback.format_exception(exc)))
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        say(exc.format_message() + "\n")
        return WRONG_INPUT
    if isinstance(exc, click.ClickException):
        context = getattr(exc, "ctx", None)
        say_error(exc.format_message(), f"{context.command_path} --help lists what it takes" if context else None)
        return WRONG_INPUT
    if isinstance(exc, EdgePCError):
        say_error(exc.message, exc.hint)
        return exc.exit_code
    if isinstance(exc, UnicodeEncodeError):
        say_error(f"{exc.object[exc.start : exc.end]!r} is not UTF-8", "convert names and texts to UTF-8")
        return WRONG_INPUT
    lack = _lack(exc)
    if lack is not None:
        say_error(*lack)
        return ENVIRONMENT_LACKS
    say_error(f"unexpected {type(exc).__name__}: {exc}", "this is a bug in edge-pc; run again with -vv to see where")
    return FAULT


def _lack(exc: Exception) -> tuple[str, str | None] | None:
    """What the environment lacks, and what to do, where that is the cause; None: it is a bug."""
    if _is_out_of_memory(exc):
        return "there is not enough memory", "close other programs, or raise the limit (ulimit -v, a cgroup)"
    if isinstance(exc, OSError):
        stdout = give_up_stdout()
        if stdout is None and not exc.filename and exc.errno in (errno.EBADF, errno.ENOSPC):
            stdout = why(exc)  # what is longer than a buffer is refused at once, and nothing is left to give up
        if stdout is not None:
            return f"stdout cannot be written: {stdout}", None
        return f"{exc.filename}: {why(exc)}" if exc.filename else why(exc), None
    library = (exc.name or "").partition(".")[0] if isinstance(exc, ImportError) else ""
    if isinstance(exc, ImportError) and library != "edge_pc":
        hint = "reinstall edge-prompt-cache; edge-pc doctor says more"
        if isinstance(exc, ModuleNotFoundError):
            return f"the library {library} is not installed", hint
        return f"a library cannot be loaded: {exc}", hint
    return None


def _is_out_of_memory(exc: BaseException) -> bool:
    """Native libraries say it in various exceptions, and so does Python."""
    said = ("bad_alloc", "bad allocation", "failed to map segment", "can't start new thread")
    return (
        isinstance(exc, MemoryError)
        or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM)
        or any(words in str(exc) for words in said)
        or (exc.__cause__ is not None and _is_out_of_memory(exc.__cause__))
    )


def _wants_traceback() -> bool:
    """The command's own -vv: an `Output` was made with it, and set the log's level."""
    import logging

    return logging.getLogger("edge_pc").level == logging.DEBUG
