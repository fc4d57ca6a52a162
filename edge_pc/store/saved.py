"""Saved conversations: one JSON file each, `<root>/sessions/<name>.json`, and their cells as entries of the store.

The file has all tokens, so that cells which are missing can be computed again. It carries a checksum: other tokens than
those that were saved would give another conversation.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from edge_pc.errors import ModelError, OptionError, StoreError
from edge_pc.models.fields import Field, check_fields, read_json, whole
from edge_pc.models.positions import MAX_POSITIONS
from edge_pc.store.faults import cannot_write
from edge_pc.store.format import MAX_TIME, is_key
from edge_pc.system.files import make_private_folder, replacing_file
from edge_pc.system.home import SESSIONS

FORMAT = 1

_SUFFIX = ".json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODE = 0o600
_MAX_TEXT = 2**24

_FIELDS = {
    "format": whole(FORMAT, FORMAT),
    "name": Field(str, high=64),
    "model": Field(str, high=4096),
    "fingerprint": Field(str, high=200),
    "fidelity": Field(str, high=20),
    "chat": Field(bool),
    "roles": Field(list, items=str, high=20),
    "token_ids": Field(list, 0, MAX_POSITIONS, items=int),
    "position_ids": Field(list, 0, MAX_POSITIONS, items=int),
    "exchanges": Field(list),
    "stretches": Field(list),
    "saved": Field(float, 0, MAX_TIME),
}


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A conversation as it is kept.

    Attributes:
        name: its own.
        model: the model's name, for people.
        fingerprint: of the model.
        fidelity: of its first turn.
        chat: its turns are in the model's chat template.
        roles: of the turns before the first question.
        token_ids, position_ids: of all of it.
        exchanges: question, answer, and the numbers of tokens before the turn and before the question's text, of each.
        stretches: store key and number of cells of each stored stretch, from the first cell on.
        saved: seconds since 1970, UTC.
    """

    name: str
    model: str
    fingerprint: str
    fidelity: str
    chat: bool
    roles: tuple[str, ...]
    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    exchanges: tuple[tuple[str, str, int, int], ...]
    stretches: tuple[tuple[str, int], ...]
    saved: float

    @property
    def turns(self) -> int:
        """Questions that were asked."""
        return len(self.exchanges)

    @property
    def keys(self) -> frozenset[str]:
        """Of the entries that it needs."""
        return frozenset(key for key, _ in self.stretches)


class SavedSessions:
    """The saved conversations of one store.

    Args:
        root: the store's folder.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / SESSIONS

    def path(self, name: str) -> Path:
        """The file of a conversation.

        Raises:
            OptionError: it cannot have this name.
        """
        if not _NAME.fullmatch(name):
            hint = "use up to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
            raise OptionError(f"{name!r} cannot be the name of a saved session", hint=hint)
        return self._folder / (name + _SUFFIX)

    def names(self) -> list[str]:
        """Of all there are."""
        with suppress(OSError):
            found = (entry.name.removesuffix(_SUFFIX) for entry in os.scandir(self._folder))
            return sorted(name for name in found if _NAME.fullmatch(name) and self.path(name).is_file())
        return []

    def readable(self) -> Iterator[SavedSession]:
        """All that can be read."""
        for name in self.names():
            with suppress(StoreError):
                yield self.read(name)

    def read(self, name: str) -> SavedSession:
        """Read one.

        Raises:
            OptionError: there is none of this name.
            StoreError: its file is damaged.
        """
        path = self.path(name)
        try:
            return _checked(read_json(path), path)
        except FileNotFoundError:
            names = ", ".join(self.names())
            hint = f"there are: {names}" if names else "none is saved; save one with /save NAME in edge-pc chat"
            raise OptionError(f"no session is saved as {name!r}", hint=hint) from None
        except ModelError as exc:
            hint = f"remove it: edge-pc cache rm {SESSIONS}/{name}"
            raise StoreError(f"the saved session {name!r} is damaged: {exc.message}", hint=hint) from exc

    def write(self, session: SavedSession) -> None:
        """Keep one, in place of another of its name.

        Raises:
            OptionError: it cannot have this name.
            StoreError: it cannot be written; an older one is still there then.
        """
        path = self.path(session.name)
        content = {"format": FORMAT, **asdict(session)}
        data = json.dumps({**content, "checksum": _checksum(content)}, ensure_ascii=False).encode()
        try:
            make_private_folder(path.parent)
            with replacing_file(path, _MODE) as file:
                file.write(data)
        except OSError as exc:
            raise cannot_write(exc, path, len(data)) from exc

    def remove(self, name: str) -> None:
        """Remove the file of one; that there is none is no error."""
        with suppress(OSError):
            self.path(name).unlink(missing_ok=True)


def _checked(data: dict[str, Any], path: Path) -> SavedSession:
    """Raises ModelError where the file is not as it was written."""
    fields = check_fields(data, _FIELDS, path)
    if data.get("checksum") != _checksum(fields):
        raise ModelError(f"{path}: its checksum is not that of its content")
    del fields["format"]
    for name in ("exchanges", "stretches"):  # the checksum says that we wrote them; this is for files made by others
        rows, kinds = fields[name], (str, str, int, int) if name == "exchanges" else (str, int)
        if not all(isinstance(row, list) and [type(value) for value in row] == list(kinds) for row in rows):
            raise ModelError(f"{path}: {name} are not rows of {', '.join(kind.__name__ for kind in kinds)}")
        fields[name] = [tuple(row) for row in rows]
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    session = SavedSession(**{**fields, **lists})
    _check_numbers(session, path)
    return session


def _check_numbers(session: SavedSession, path: Path) -> None:
    count = len(session.token_ids)
    pairs = zip(session.position_ids, session.position_ids[1:], strict=False)
    starts = [number for _, _, *numbers in session.exchanges for number in numbers]
    if (
        not count
        or len(session.position_ids) != count
        or not all(before < after for before, after in pairs)
        or starts != sorted(starts)
        or not all(0 <= start <= count for start in starts)
        or not all(is_key(key) and tokens > 0 for key, tokens in session.stretches)
        or sum(tokens for _, tokens in session.stretches) > count
    ):
        raise ModelError(f"{path}: its numbers do not fit together")


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
