"""Options that commands share, each stated once: its name, its variable, its default, its help.

`--max-tokens` can also be set as `EDGE_PC_MAX_TOKENS`, and so on for every option of every command; the command line
wins. A repeatable option takes one value a line from its variable. Options come in groups: a group's values reach the
command as one object, and its title heads them in `--help`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edge_pc.errors import OptionError
from edge_pc.system.sizes import parse_size

if TYPE_CHECKING:
    from edge_pc.compose.encodings import EncodingRule
    from edge_pc.compose.laid_out import Tail
    from edge_pc.runtime.prefill import Serving
    from edge_pc.runtime.sampling import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])


def reads(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that turns an option's text into a value; a fault names the option."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except OptionError as exc:
            raise click.BadParameter(f"{exc.message}: {exc.hint}", ctx=ctx, param=param) from exc

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


def option(*names: str, group: str = "Options", **attributes: Any) -> Callable[[Command], Command]:
    """A `click.option` that can also be set by the variable `EDGE_PC_<LONG_NAME>`."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = "EDGE_PC_" + long_name.strip("-").replace("-", "_").upper()
    return click.option(*names, cls=GroupedOption, group=group, envvar=variable, **attributes)


def grouped(kind: type[Any], name: str, *options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Adds `options` to a command, which gets their values as the argument `name`, an object of `kind`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*args: Any, **values: Any) -> Any:
            group = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            return command(*args, **{name: group}, **values)

        decorated: Any = call
        for add in reversed(options):
            decorated = add(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


@dataclass(frozen=True, slots=True)
class OutputOptions:
    quiet: bool
    verbose: int


output_options = grouped(
    OutputOptions,
    "output",
    option("-q", "--quiet", group="Output", is_flag=True, help="Only the answer, and errors."),
    option("-v", "--verbose", group="Output", count=True, help="Say more; twice: also tracebacks and native logs."),
)

json_option = option("--json", "as_json", group="Output", is_flag=True, help="One JSON object on stdout.")
cache_dir_option = option(
    "--cache-dir", group="Model and cache", metavar="DIR", help="Where KV states lie.  [default: see `cache path`]"
)
model_option = option(
    "--model",
    group="Model and cache",
    metavar="NAME|DIR",
    default="smollm2",
    show_default=True,
    help="A pulled model's name, or the folder of an exported model.",
)


backend_option = option(
    "--backend",
    group="Model and cache",
    type=click.Choice(["onnx", "llamacpp"]),
    default="onnx",
    show_default=True,
    help="What runs the model.",
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is opened with; `open_engine` in `session.py` does it."""

    model: str
    backend: str
    provider: str
    threads: int | None
    cache_dir: str | None
    max_cache_size: int | None
    kv_storage: str
    assembly: str
    encoding: EncodingRule
    tail: Tail

    def of_backend(self) -> dict[str, Any]:
        """Options that belong to the backend; None: not given."""
        return {name: getattr(self, name) for name in ("threads", "provider", "assembly", "kv_storage")}


_ENGINE_GROUP = "Model and cache"
engine_options = grouped(
    EngineOptions,
    "engine_options",
    model_option,
    backend_option,
    option(
        "--provider",
        group=_ENGINE_GROUP,
        metavar="NAME",
        help="Execution provider of ONNX Runtime: cpu, cuda.",
    ),
    option(
        "--threads",
        group=_ENGINE_GROUP,
        type=click.IntRange(min=1),
        metavar="N",
        help="Compute threads.  [default: the CPUs this process may use]",
    ),
    cache_dir_option,
    option(
        "--max-cache-size",
        group=_ENGINE_GROUP,
        callback=reads(parse_size),
        metavar="SIZE",
        help="Keep the stored states below this (2GiB); the least useful go first.",
    ),
    option(
        "--kv-storage",
        group=_ENGINE_GROUP,
        type=click.Choice(["float32", "float16"]),
        help="Number type of stored states; float16 halves the disk and loads slower.",
    ),
    option(
        "--assembly",
        group=_ENGINE_GROUP,
        type=click.Choice(["auto", "map", "copy"]),
        help="How stored states reach the model: mapped, copied, or what is faster.",
    ),
    option(
        "--encoding",
        group=_ENGINE_GROUP,
        type=click.Choice(["guaranteed", "isolated"]),
        default="guaranteed",
        show_default=True,
        help="A module is encoded seeing what is surely before it, or alone (as the paper).",
    ),
    option(
        "--tail",
        group=_ENGINE_GROUP,
        type=click.Choice(["imported", "schema"]),
        default="imported",
        show_default=True,
        help="Free text starts after the last imported module, or after the whole schema.",
    ),
)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Fields and defaults are those of `edge_pc.runtime.sampling.Sampling` (a test compares them)."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]

    def build(self) -> Sampling:
        from edge_pc.runtime.sampling import Sampling

        return Sampling(**{field.name: getattr(self, field.name) for field in fields(self)})


def _sampling(name: str, help: str, **attributes: Any) -> Callable[[Any], Any]:
    return option(name, group="Sampling", help=help, show_default=attributes.get("default") is not None, **attributes)


sampling_options = grouped(
    SamplingOptions,
    "sampling",
    _sampling("--max-tokens", "The longest answer, in tokens.", type=click.IntRange(1), metavar="N", default=256),
    _sampling(
        "--temperature",
        "0 always takes the likeliest token; more is more varied.",
        type=click.FloatRange(0),
        metavar="T",
        default=0.0,
    ),
    _sampling("--top-k", "Only the K likeliest tokens; 0: all.", type=click.IntRange(0), metavar="K", default=0),
    _sampling(
        "--top-p",
        "Only the likeliest tokens that add up to P.",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="P",
        default=1.0,
    ),
    _sampling(
        "--min-p",
        "Only tokens at least P times as likely as the likeliest.",
        type=click.FloatRange(0, 1),
        metavar="P",
        default=0.0,
    ),
    _sampling(
        "--repetition-penalty",
        "Above 1 makes tokens of the prompt and the answer less likely.",
        type=click.FloatRange(0, min_open=True),
        metavar="R",
        default=1.0,
    ),
    _sampling("--seed", "Makes sampling repeatable.", type=int, metavar="N"),
    _sampling("--stop", "End the answer before this text. Repeatable.", metavar="TEXT", multiple=True),
)


@dataclass(frozen=True, slots=True)
class ServingOptions:
    no_cache: bool
    exact: bool
    strict: bool
    compare: bool
    stats: bool

    def build(self) -> Serving:
        """How the engine is to serve."""
        from edge_pc.runtime.prefill import Serving

        return Serving(use_cache=not self.no_cache, exact=self.exact, strict=self.strict)


serving_options = grouped(
    ServingOptions,
    "serving",
    option("--no-cache", is_flag=True, help="Compute the whole prompt; neither read nor write states."),
    option(
        "--exact", is_flag=True, help="Keep cells in position order behind gaps too: no other sums than without reuse."
    ),
    option("--strict", is_flag=True, help="Fail if a module's states are not stored already."),
    option("--compare", is_flag=True, help="Also compute the whole prompt, and compare time and logits."),
    option("--stats", is_flag=True, help="Show what was reused, what was computed, and how long it took."),
)
