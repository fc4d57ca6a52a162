"""The JSON report that all benches write and all tables and pictures are made from; docs/bench.md describes it.

A report is one file with a section for each bench. A row is written as soon as it is measured, under a key that says
what was measured, so that a bench which was interrupted finds its rows and goes on. The file is replaced as a whole:
whatever moment a person presses Ctrl-C, it is a valid report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.errors import OptionError
from edge_pc.system.files import replacing_file

FORMAT = 1

Row = dict[str, Any]

# progress(done, total, text): how far a bench is, in pieces of work, and which piece comes next. All benches take one.
Progress = Callable[[int, int, str], None]

# Facts of the machine that make two runs comparable; measured ones vary from run to run.
_IDENTITY = ("vendor", "cpu", "family", "allowed_cores", "versions")


def no_progress(done: int, total: int, text: str) -> None:
    """A `Progress` that shows nothing."""


class Section:
    """One bench's part of a report.

    Attributes:
        name: the bench's.
    """

    def __init__(self, report: Report, name: str, data: dict[str, Any]) -> None:
        self.name = name
        self._report = report
        self._data = data
        self._keys = {row["key"] for row in data["rows"]}

    @property
    def settings(self) -> dict[str, Any]:
        """What the bench was asked for."""
        settings: dict[str, Any] = self._data["settings"]
        return settings

    @property
    def command(self) -> str:
        """The command line that began it."""
        return str(self._data["command"])

    @property
    def rows(self) -> list[Row]:
        """In the order they were measured; each has its `key`."""
        rows: list[Row] = self._data["rows"]
        return rows

    @property
    def summary(self) -> dict[str, Any]:
        """What follows from the rows; empty until the bench is through."""
        summary: dict[str, Any] = self._data["summary"]
        return summary

    def row_done(self, key: str) -> bool:
        """Whether a row of this key was measured already."""
        return key in self._keys

    def row(self, key: str) -> Row | None:
        """The row of this key."""
        return next((row for row in self.rows if row["key"] == key), None)

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row and save the report; a row of the same key is replaced.

        Raises:
            ValueError: a number is infinite or not a number: JSON has none of these.
        """
        new = _plain_json({"key": key, **row})
        if key in self._keys:
            self._data["rows"] = [old for old in self.rows if old["key"] != key]
        self.rows.append(new)
        self._keys.add(key)
        self._report.save()

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Set the summary and save the report."""
        self._data["summary"] = _plain_json(summary)
        self._report.save()


class Report:
    """A report and its file.

    Args:
        path: where it lies, or will.
        data: its content, as docs/bench.md describes it.
    """

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self._data = data

    @classmethod
    def create(
        cls, path: Path, *, command: Sequence[str], machine: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> Report:
        """A new report, saved at once, in place of whatever lay at `path`.

        Args:
            command: the words of the command line; folders are cut off their paths.
            machine: what `edge_pc.bench.machine.machine_facts` gives.
            settings: what all sections share: the model, its sizes, threads.

        Raises:
            OptionError: it cannot be written.
        """
        data = {
            "format": FORMAT,
            "created": now(),
            "command": command_text(command),
            "machine": _plain_json(machine),
            "settings": _plain_json(settings),
            "sections": {},
        }
        report = cls(path, data)
        report.save()
        return report

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report.

        Raises:
            OptionError: there is none, or it is not one of this format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise OptionError(f"the report {path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise OptionError(f"{path} is not a report: it is not JSON ({exc})") from exc
        if not isinstance(data, dict) or not {"format", "machine", "sections"} <= data.keys():
            raise OptionError(f"{path} is not a report of edge-pc bench")
        if data["format"] != FORMAT:
            raise OptionError(
                f"{path} has format {data['format']!r}, this version reads format {FORMAT}", hint="measure it again"
            )
        return cls(path, data)

    @classmethod
    def resume(cls, path: Path, *, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> Report:
        """The report at `path`, to go on with.

        Args:
            machine: of the machine that goes on, what `edge_pc.system.machine` says and `versions`.
            settings: as of `create`.

        Raises:
            OptionError: what lies there is no report, or of another machine or other settings.
        """
        report = cls.load(path)
        known, here = _identity(report.machine), _identity(machine)
        differing = [name for name in here if known[name] != here[name]]
        wanted = _plain_json(settings)
        differing += [name for name in wanted if report.settings.get(name) != wanted[name]]
        if differing:
            raise OptionError(
                f"{path} was measured with another {', '.join(differing)}: rows would not be comparable",
                hint="give another file with -o, or --restart to measure anew",
            )
        return report

    @property
    def machine(self) -> dict[str, Any]:
        machine: dict[str, Any] = self._data["machine"]
        return machine

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._data["settings"]
        return settings

    @property
    def created(self) -> str:
        return str(self._data["created"])

    @property
    def command(self) -> str:
        return str(self._data["command"])

    @property
    def sections(self) -> dict[str, Section]:
        """By name, in the order they were begun."""
        return {name: Section(self, name, data) for name, data in self._data["sections"].items()}

    def section(
        self, name: str, settings: Mapping[str, Any], *, command: Sequence[str] = (), restart: bool = False
    ) -> Section:
        """A section to fill: the rows that are there already are kept.

        Args:
            settings: what the bench is asked for (numbers, text, lists of these).
            command: the words of the command line that fills it.
            restart: throw the section's rows away.

        Raises:
            OptionError: the section was begun with other settings.
        """
        sections = self._data["sections"]
        wanted = _plain_json(settings)
        if name not in sections or restart:
            sections[name] = {
                "created": now(),
                "command": command_text(command),
                "settings": wanted,
                "rows": [],
                "summary": {},
            }
            self.save()
        found = sections[name]["settings"]
        differing = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {found.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
            raise OptionError(
                f"section {name} of {self.path} was begun with other settings: {changes}",
                hint="give another file with -o, or --restart to measure the section anew",
            )
        return Section(self, name, sections[name])

    def save(self) -> None:
        """Replace the file by what is known now.

        Raises:
            OptionError: it cannot be written.
        """
        text = _dump(self._data, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(self.path) as file:
                file.write(f"{text}\n".encode())
        except OSError as exc:
            raise OptionError(f"the report {self.path} cannot be written: {exc.strerror}") from exc


def _identity(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same when a report goes on. Of the system its name: updates change its release."""
    return {name: machine.get(name) for name in _IDENTITY} | {"system": machine.get("system", "").partition(" ")[0]}


def now() -> str:
    """This moment, UTC, to the second, as ISO 8601 writes it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_text(words: Sequence[str]) -> str:
    """A command line without the folders of its paths: they may hold a person's name."""

    def shortened(word: str) -> str:
        option, sign, value = word.rpartition("=")
        return option + sign + (Path(value).name if Path(value).is_absolute() else value)

    return " ".join(map(shortened, words))


def _dump(value: object, indent: int | None = None) -> str:
    """JSON; numpy's numbers and arrays become plain ones."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, default=_plain)


def _plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """What comes back when `value` is written and read again."""
    read: dict[str, Any] = json.loads(_dump(dict(value)))
    return read


def _plain(value: object) -> object:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written into a report")
