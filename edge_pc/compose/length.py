"""What is said when a text is too long for a model: how much there is, how much fits, and what to leave out.

Whoever asks about files has made no schema. So of a schema that was made of files only the files are spoken of.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_pc.errors import ContextLengthError
from edge_pc.pml.model import Schema

# Of parts, and of names to leave out. A message must be short enough to be read.
_LISTED_PARTS = 8
_LISTED_NAMES = 3
_NAME_CHARACTERS = 60

ANONYMOUS = "(anonymous text)"


def length_error(
    schema: Schema, modules: Mapping[str, int], needed: int, room: int, *, text: int = 0, answer: int = 0
) -> ContextLengthError:
    """The error for a schema, or for a prompt and its answer, that need more positions than there are.

    Args:
        schema: which one.
        modules: path → tokens of its own text; the anonymous text's path is empty.
        needed: positions, gaps included.
        room: positions of the model.
        text: tokens of a prompt's own text.
        answer: tokens that its answer may have; 0: this is about the schema alone.
    """
    if schema.made_of_files:
        return _about_files(modules, needed, room, text, answer)
    if not schema.children:
        parts = {"(messages)": text + sum(modules.values()), "(answer)": answer}
        return _error(
            "prompt and answer take", parts, needed, room, "leave out early messages, or ask for fewer tokens"
        )
    parts = {path or ANONYMOUS: tokens for path, tokens in modules.items()}
    if not answer:
        hint = "shorten modules, or put alternatives into a union so that they share positions"
        return _error(f"schema {schema.name!r} takes", parts, needed, room, hint)
    parts |= {"(arguments and free text)": text, "(answer)": answer}
    hint = "shorten the text, ask for fewer tokens, or leave out modules at the end of the schema"
    return _error("the prompt and its answer take", parts, needed, room, hint)


def _about_files(modules: Mapping[str, int], needed: int, room: int, text: int, answer: int) -> ContextLengthError:
    files: dict[str, int] = {}
    for path, tokens in modules.items():
        name = path.partition("/")[0]
        files[name] = files.get(name, 0) + tokens
    instruction = files.pop("", 0)
    what = "the files, the question and the answer take" if answer else "the files take"
    parts = files | {"(instruction)": instruction, "(question)": text, "(answer)": answer}
    return _error(what, parts, needed, room, _what_to_do(files, needed - room, text, answer))


def _what_to_do(files: Mapping[str, int], excess: int, text: int, answer: int) -> str:
    """How `excess` tokens can be saved, with as few files left out as can be."""
    by_size = sorted(files, key=lambda name: -files[name])
    enough = [name for name in by_size if files[name] >= excess]
    left_out = enough[-1:]
    for name in () if enough else by_size:
        left_out.append(name)
        if sum(files[name] for name in left_out) >= excess:
            break
    if text > files[by_size[0]]:
        what = "shorten the question"
    elif len(left_out) == len(files):
        what = f"ask about a part of {_shown(by_size[0])}"
    else:
        what = f"leave out {', '.join(map(_shown, left_out[:_LISTED_NAMES]))}"
        if len(left_out) > _LISTED_NAMES:
            what += f" and {len(left_out) - _LISTED_NAMES} more"
    return f"{what}, or ask for fewer tokens" if answer > excess else what


def _error(what: str, parts: Mapping[str, int], needed: int, room: int, hint: str) -> ContextLengthError:
    by_size = sorted(((name, tokens) for name, tokens in parts.items() if tokens), key=lambda part: -part[1])
    rest = by_size[_LISTED_PARTS:]
    lines = [f"{what} {needed} tokens, and the model has room for {room}:"]
    lines += [f"  {tokens:6d}  {_shown(name)}" for name, tokens in by_size[:_LISTED_PARTS]]
    if rest:
        lines.append(f"  {sum(tokens for _, tokens in rest):6d}  in {len(rest)} more")
    return ContextLengthError("\n".join(lines), hint=hint)


def _shown(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"
