"""Writes `docs/cli.md` and the table of commands in `README.md` from the commands themselves (`make docs`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from edge_pc.cli import EPILOG, cli

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "cli.md"
README = ROOT / "README.md"
TABLE_BEGIN = "<!-- commands: made by `make docs` -->"
TABLE_END = "<!-- end of commands -->"
OWN_GROUP = "Options"


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command that does something, with its context, in the order of `--help`."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None:
            raise LookupError(name)
        child = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from commands(command, child)
        else:
            yield command, child


def all_commands() -> list[tuple[click.Command, click.Context]]:
    return list(commands(cli, click.Context(cli, info_name="edge-pc")))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def option_row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if not option.is_flag and not option.count:
        names += f" {cell(option.make_metavar(context))}"
    record = option.get_help_record(context)
    return f"| {names} | `{option.envvar}` | {cell(record[1] if record else '')} |"


def options_table(options: list[click.Option], context: click.Context) -> list[str]:
    return ["", "| option | variable | |", "|---|---|---|", *[option_row(option, context) for option in options]]


def by_group(command: click.Command) -> dict[str, list[click.Option]]:
    groups: dict[str, list[click.Option]] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            groups.setdefault(getattr(parameter, "group", OWN_GROUP), []).append(parameter)
    return groups


def usage(command: click.Command, context: click.Context) -> str:
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def description(command: click.Command) -> str:
    """A command's help as Markdown; what `\\b` keeps as it is becomes a code block."""
    paragraphs = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            paragraphs.append("```\n" + paragraph.removeprefix("\b").strip("\n") + "\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def command_section(command: click.Command, context: click.Context) -> list[str]:
    lines = ["", f"## {context.command_path}", "", "```", usage(command, context), "```", "", description(command)]
    groups = by_group(command)
    if OWN_GROUP in groups:
        lines += options_table(groups.pop(OWN_GROUP), context)
    for title, options in groups.items():
        anchor = title.lower().replace(" ", "-")
        lines += ["", f"[{title}](#{anchor}): " + ", ".join(f"`{option.opts[-1]}`" for option in options)]
    return lines


def reference() -> str:
    """The text of docs/cli.md."""
    found = all_commands()
    lines = ["# Commands", "", "Made by `make docs` from the commands themselves.", "", EPILOG]
    shared: dict[str, dict[str, tuple[click.Option, click.Context]]] = {}
    for command, context in found:
        lines += command_section(command, context)
        for title, options in by_group(command).items():
            if title != OWN_GROUP:
                shared.setdefault(title, {}).update({option.opts[-1]: (option, context) for option in options})
    for title, entries in shared.items():
        context = next(iter(entries.values()))[1]
        lines += ["", f"## {title}", *options_table([option for option, _ in entries.values()], context)]
    return "\n".join(lines) + "\n"


def commands_table() -> str:
    """The table in README.md."""
    rows = [
        f"| `{cell(usage(command, context).replace(' [OPTIONS]', ''))}` | {cell(command.get_short_help_str(200))} |"
        for command, context in all_commands()
    ]
    return "\n".join(["| command | |", "|---|---|", *rows])


def with_table(readme: str) -> str:
    """README.md with its table of commands made again."""
    before, _, rest = readme.partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    return f"{before}{TABLE_BEGIN}\n{commands_table()}\n{TABLE_END}{after}"


def main() -> None:
    REFERENCE.write_text(reference(), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {REFERENCE.relative_to(ROOT)} and the table of commands in {README.name}\n")


if __name__ == "__main__":
    main()
