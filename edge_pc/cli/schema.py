"""`edge-pc schema`: explain a schema before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from edge_pc.cli import WRONG_INPUT
from edge_pc.cli.options import GroupedCommand, OutputOptions, backend_option, json_option, model_option, output_options
from edge_pc.cli.output import Output, counted
from edge_pc.cli.sources import read_schema
from edge_pc.cli.streams import say_error
from edge_pc.errors import ContextLengthError, PMLError

if TYPE_CHECKING:
    from edge_pc.compose.encodings import SchemaEncodings
    from edge_pc.compose.schema_layout import ModuleLayout, SchemaLayout
    from edge_pc.compose.seams import Seam
    from edge_pc.models.spec import ModelSpec

_SHOWN_CHARACTERS = 24


@click.group()
def schema() -> None:
    """Check a schema, or show its modules, positions and lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """A schema as a model sees it."""

    layout: SchemaLayout
    encodings: SchemaEncodings
    warnings: list[str]
    spec: ModelSpec

    @classmethod
    def read(cls, source: str, model: str, backend: str) -> Explained:
        """Read a schema from a file or stdin (-) and lay it out for a model. No weights are loaded."""
        from edge_pc.backends import entry
        from edge_pc.compose.composer import Composer
        from edge_pc.compose.conversation import check_turns
        from edge_pc.compose.seams import find_seams
        from edge_pc.models.registry import locate

        schema = read_schema(source)
        opened = entry(backend)
        described = opened.describe(locate(model, opened.model_kind))
        composed = Composer(described).schema(schema)
        roles = composed.layout.roles
        merges = check_turns(described.chat_template, [*roles, "user"]) if roles else []
        warnings = [f"{schema.name}: the model's chat template {merge}" for merge in merges]
        warnings += map(_seam_text, find_seams(schema, described.tokenizer))
        return cls(composed.layout, composed.encodings, warnings, described.spec)

    def sees(self, path: str) -> list[tuple[str, int]]:
        """(path, tokens) of a module's guaranteed context, its own text left out; the path of anonymous text is ''."""
        return [(part.encoding.paths[0], part.tokens) for part in self.encodings.single(path).context]


@schema.command(cls=GroupedCommand)
@click.argument("schemas", metavar="SCHEMA|-...", nargs=-1, required=True)
@model_option
@backend_option
@json_option
@output_options
def check(schemas: tuple[str, ...], model: str, backend: str, as_json: bool, output: OutputOptions) -> int:
    """Check schemas; exits with 0 if all of them can be used.

    Warns where two texts meet that would have other tokens if they were tokenized as one, and where the model's chat
    template has no place for a turn, which is then merged into another.
    """
    out = Output(output)
    findings = [_finding(source, model, backend) for source in schemas]
    good = all(finding["ok"] for finding in findings)
    if as_json:
        out.json({"ok": good, "schemas": findings})
    else:
        for finding in findings:
            _show_finding(finding, out)
    return 0 if good else WRONG_INPUT


def _finding(source: str, model: str, backend: str) -> dict[str, Any]:
    """What there is to say about one schema."""
    try:
        explained = Explained.read(source, model, backend)
    except (PMLError, ContextLengthError) as exc:
        return {"schema": source, "ok": False, "error": exc.message, "hint": exc.hint, "warnings": []}
    return {
        "schema": source,
        "ok": True,
        "modules": len(explained.layout.modules) - 1,
        "positions": explained.layout.length,
        "max_positions": explained.spec.max_positions,
        "warnings": explained.warnings,
    }


def _show_finding(finding: dict[str, Any], out: Output) -> None:
    for warning in finding["warnings"]:
        out.note(f"warning: {warning}")
    if finding["ok"]:
        modules = counted(finding["modules"], "module")
        out.note(
            f"{finding['schema']}: fine; {modules}, {finding['positions']} of {finding['max_positions']} positions"
        )
    else:
        say_error(finding["error"], finding["hint"])


def _seam_text(seam: Seam) -> str:
    at = seam.after.at
    before, after = seam.before.text[-_SHOWN_CHARACTERS:], seam.after.text[:_SHOWN_CHARACTERS]
    return (
        f"{at.source or '<text>'}:{at.line}:{at.column}: {after!r} may follow {before!r}; tokenized as one text they "
        "would have other tokens (put white space between them)"
    )


@schema.command(cls=GroupedCommand)
@click.argument("source", metavar="SCHEMA|-")
@model_option
@backend_option
@json_option
@output_options
def show(source: str, model: str, backend: str, as_json: bool, output: OutputOptions) -> None:
    """Show a schema's modules: first position, length in tokens, and what each attends to.

    A module's states are computed once, attending only to what is always present when the module is.
    """
    out = Output(output)
    explained = Explained.read(source, model, backend)
    if as_json:
        out.json(_as_json(explained))
    else:
        from edge_pc.cli.schema_tree import schema_tree

        out.show(schema_tree(explained))


def _as_json(explained: Explained) -> dict[str, Any]:
    layout = explained.layout
    return {
        "schema": layout.name,
        "positions": layout.length,
        "max_positions": explained.spec.max_positions,
        "modules": [_module_as_json(module, explained) for module in layout.modules.values()],
        "scaffolds": [{"name": s.name, "scope": s.scope, "members": list(s.members)} for s in layout.scaffolds],
        "warnings": explained.warnings,
    }


def _module_as_json(module: ModuleLayout, explained: Explained) -> dict[str, Any]:
    return {
        "path": module.path,
        "parent": module.parent,
        "start": module.start,
        "length": module.length,
        "tokens": len(module.token_ids),
        "cache": module.cache,
        "sees": [{"path": path, "tokens": tokens} for path, tokens in explained.sees(module.path)],
        "parameters": [
            {"name": slot.name, "start": slot.start, "length": slot.length, "required": slot.default_ids is None}
            for slot in module.slots
        ],
    }
