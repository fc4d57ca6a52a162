"""Options that commands share, each stated once: its name, its variable, its default, its help.

`--max-tokens` can also be set as `EDGE_PC_MAX_TOKENS`, and so on for every option of every command; the command line
wins. A repeatable option takes one value a line from its variable. Options come in groups: a group's values reach the
command as one object, and its title heads them in `--help`. Choices, ranges and defaults are those of the API.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import click

from edge_pc.backends import BACKENDS, DEFAULT_BACKEND
from edge_pc.checks import THREADS
from edge_pc.cli.values import PATH, TEXT, number
from edge_pc.cli.variables import PREFIX, warn_of_unknown_variables
from edge_pc.compose.choices import (
    DEFAULT_ENCODING,
    DEFAULT_SYSTEM,
    ENCODING_RULES,
    TAILS,
    EncodingRule,
    Tail,
)
from edge_pc.errors import OptionError
from edge_pc.models.registry import DEFAULT_MODEL
from edge_pc.runtime.sampling import DEFAULT_MAX_TOKENS, RANGES, Grammar, Sampling
from edge_pc.runtime.serving import DEFAULT_FIDELITY, FIDELITIES, Fidelity
from edge_pc.system.sizes import parse_size
from edge_pc.system.text import read_text

if TYPE_CHECKING:
    from edge_pc.runtime.serving import Serving

_MAX_JSON_SCHEMA = 1 << 20

Command = TypeVar("Command", bound=Callable[..., Any])


def reads(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that turns an option's text into a value; a fault names the option."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except OptionError as exc:
            message = f"{exc.message}: {exc.hint}" if exc.hint else exc.message
            raise click.BadParameter(message, ctx=ctx, param=param) from exc

    return callback


class GroupedOption(click.Option):
    """An option that stands under the heading `group` in `--help`; repeated, its variable holds one value a line."""

    def __init__(self, *args: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group

    def value_from_envvar(self, ctx: click.Context) -> Any:
        text = self.resolve_envvar_value(ctx)
        if self.multiple and text is not None:
            return [line for line in text.splitlines() if line]
        return super().value_from_envvar(ctx)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options under the headings of their groups."""

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.params.get("quiet"):
            warn_of_unknown_variables(ctx)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class InOrder(click.Group):
    """Lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def option(*names: str, group: str = "Options", **attributes: Any) -> Callable[[Command], Command]:
    """A `click.option` that can also be set by the variable `EDGE_PC_<LONG_NAME>`."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = PREFIX + long_name.strip("-").replace("-", "_").upper()
    return click.option(*names, cls=GroupedOption, group=group, envvar=variable, **attributes)


def grouped(make: Callable[..., Any], name: str, *options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Adds `options` to a command, which gets what `make` makes of their values as the argument `name`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*args: Any, **values: Any) -> Any:
            group = make(**{option: values.pop(option) for option in names})
            return command(*args, **{name: group}, **values)

        decorated: Any = call
        others = len(getattr(call, "__click_params__", ()))
        for add in reversed(options):
            decorated = add(decorated)
        names = [param.name for param in decorated.__click_params__[others:]]
        return decorated  # type: ignore[no-any-return]

    return decorate


@dataclass(frozen=True, slots=True)
class OutputOptions:
    quiet: bool
    verbose: int


output_options = grouped(
    OutputOptions,
    "output",
    option("-q", "--quiet", group="Output", is_flag=True, help="Show only the answer and errors."),
    option(
        "-v", "--verbose", group="Output", count=True, help="Show more; given twice, also tracebacks and native logs."
    ),
)

json_option = option("--json", "as_json", group="Output", is_flag=True, help="Print one JSON object on stdout.")

_ENGINE = "Model and cache"
cache_dir_option = option(
    "--cache-dir",
    group=_ENGINE,
    type=PATH,
    metavar="DIR",
    help="Where KV states are kept.  [default: see `cache path`]",
)
model_option = option(
    "--model",
    group=_ENGINE,
    type=PATH,
    metavar="NAME|DIR",
    default=DEFAULT_MODEL,
    show_default=True,
    help="A pulled model's name, or the folder of an exported model.",
)
backend_option = option(
    "--backend",
    group=_ENGINE,
    type=click.Choice(list(BACKENDS)),
    default=DEFAULT_BACKEND,
    show_default=True,
    help="What runs the model.",
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is opened with; `open_engine` does it.

    Attributes:
        own: the backend's own options, as far as they were given.
    """

    model: str
    backend: str
    cache_dir: str | None
    max_cache_size: int | None
    encoding: EncodingRule
    tail: Tail | None
    own: Mapping[str, Any]

    @classmethod
    def of(cls, **values: Any) -> EngineOptions:
        own = {name: values.pop(name) for name in _OWN_HELP}
        return cls(**values, own={name: value for name, value in own.items() if value is not None})


# (metavar, help) of each option that belongs to backends.
_OWN_HELP = {
    "threads": ("N", "Compute threads.  [default: the CPUs this process may use]"),
    "provider": ("NAME", "Execution provider: cpu or cuda."),
    "assembly": (None, "How stored states reach the model: mapped, copied, or whichever is faster."),
    "kv_storage": (None, "Number type of stored states; float16 takes half the disk and loads more slowly."),
}


def _own(name: str, metavar: str | None, help: str) -> Callable[[Any], Any]:
    """An option that belongs to backends. It has no default here: what is not given is the backend's own affair."""
    having = {key: entry.options for key, entry in BACKENDS.items() if name in get_type_hints(entry.options)}
    options = next(iter(having.values()))
    default = next(field.default for field in fields(options) if field.name == name)
    choices = get_args(get_type_hints(options)[name])
    kind: Any = number(THREADS) if name == "threads" else click.Choice(choices) if choices else str
    notes = [] if len(having) == len(BACKENDS) else [f"only {', '.join(having)}"]
    notes += [] if default is None else [f"default: {default}"]
    shown = f"{help}  [{'; '.join(notes)}]" if notes else help
    return option("--" + name.replace("_", "-"), group=_ENGINE, type=kind, metavar=metavar, help=shown)


engine_options = grouped(
    EngineOptions.of,
    "engine_options",
    model_option,
    backend_option,
    *(_own(name, *texts) for name, texts in _OWN_HELP.items()),
    cache_dir_option,
    option(
        "--max-cache-size",
        group=_ENGINE,
        callback=reads(parse_size),
        metavar="SIZE",
        help="Keep the stored states below this size (2GiB); the least recently used are removed first. "
        "A limit below what is stored removes nothing.",
    ),
    option(
        "--encoding",
        group=_ENGINE,
        type=click.Choice(ENCODING_RULES),
        default=DEFAULT_ENCODING,
        show_default=True,
        help="Encode a module after what is certain to precede it (with neutral text for the rest), or alone.",
    ),
    option(
        "--tail",
        group=_ENGINE,
        type=click.Choice(TAILS),
        show_default="packed where states can be moved, else imported",
        help="Close gaps that modules left out; or keep them, with free text after the last module or the schema.",
    ),
)


def _sampling(name: str, metavar: str, help: str, **attributes: Any) -> Callable[[Any], Any]:
    """An option for a field of `Sampling`, with its default and its range."""
    default, allowed = getattr(_GREEDY, name), RANGES.get(name)
    if allowed is not None:
        attributes["type"] = number(allowed)
    shown = default is not None and "multiple" not in attributes
    long_name = "--" + name.replace("_", "-")
    return option(
        long_name, group="Sampling", metavar=metavar, help=help, default=default, show_default=shown, **attributes
    )


def _read_grammar(path: str) -> Grammar:
    """The grammar of JSON that fits the schema in a file."""
    return Grammar.json(read_text(Path(os.path.expanduser(path)), _MAX_JSON_SCHEMA))


_GREEDY = Sampling()
sampling_options = grouped(
    Sampling,
    "sampling",
    _sampling("max_tokens", "N", f"The longest answer, in tokens.  [default: {DEFAULT_MAX_TOKENS}, or what fits]"),
    _sampling("temperature", "T", "0 always takes the likeliest token; higher values vary more."),
    _sampling("top_k", "K", "Only the K likeliest tokens; 0: all."),
    _sampling("top_p", "P", "Only the likeliest tokens that add up to P."),
    _sampling("min_p", "P", "Only tokens at least P times as likely as the likeliest."),
    _sampling("repetition_penalty", "R", "Above 1: make tokens of the prompt and of the answer less likely."),
    _sampling("seed", "N", "Make sampling repeatable."),
    _sampling("stop", "TEXT", "End the answer before this text. Repeatable.", multiple=True, type=TEXT),
    _sampling("logprobs", "N", "With --json: each token's log-probability, and those of the N likeliest tokens."),
    option(
        "--json-schema",
        "grammar",
        group="Sampling",
        callback=reads(_read_grammar),
        metavar="FILE",
        help="Answer with JSON that fits this JSON Schema (extra serve).",
    ),
)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    no_cache: bool
    fidelity: Fidelity
    strict: bool
    compare: bool
    stats: bool
    refine: bool

    def build(self) -> Serving:
        """How the engine is to serve."""
        from edge_pc.runtime.serving import Serving

        return Serving(use_cache=not self.no_cache, fidelity=self.fidelity, strict=self.strict)


serving_options = grouped(
    ServingOptions,
    "serving",
    option("--no-cache", is_flag=True, help="Compute the whole prompt; neither read nor write states."),
    option(
        "--fidelity",
        type=click.Choice(FIDELITIES),
        default=DEFAULT_FIDELITY,
        show_default=True,
        help="How close reuse comes to full prefill: stored states as they are, with the tokens that matter most "
        "computed again, or the same as full prefill.",
    ),
    option("--strict", is_flag=True, help="Fail if a module's states are not already stored."),
    option("--compare", is_flag=True, help="Also compute the whole prompt, and compare time and logits."),
    option("--stats", is_flag=True, help="Show what was reused, what was computed, and how long it took."),
    option(
        "--refine",
        is_flag=True,
        help="After the answer, make exact states for these modules in this order, for the next time.",
    ),
)


system_option = option(
    "--system",
    type=TEXT,
    metavar="TEXT",
    help=f"Tell the model what to do with the documents.  [default: {DEFAULT_SYSTEM}]",
)


def answer_options(command: Any) -> Any:
    """Adds the options that all commands that answer have."""
    for add in (output_options, json_option, engine_options, sampling_options, serving_options):
        command = add(command)
    return command
