"""The JSON report that all benches write into; docs/bench.md describes it.

A section holds what one bench measured, as rows of one type, and the tables and pictures that follow from them.
Whoever shows a report needs only these, so that it can hold sections of benches that this package does not know.

A row is written as soon as it is measured, under a key that says what was measured: a bench that was interrupted finds
its rows and goes on. The file is replaced as a whole, and is valid whenever a person presses Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

from edge_pc.bench.charts import Picture
from edge_pc.bench.plain import from_plain, to_plain
from edge_pc.bench.rows import Row
from edge_pc.bench.tables import Table
from edge_pc.errors import OptionError
from edge_pc.system.files import replacing_file

FORMAT = 2

T = TypeVar("T")
R = TypeVar("R", bound=Row)

# Facts of the machine that make two runs comparable; measured ones vary from run to run.
_IDENTITY = ("vendor", "cpu", "family", "allowed_cores", "versions")


class Section(Generic[R]):
    """One bench's part of a report, to be filled.

    Attributes:
        rows: in the order they were measured.
    """

    def __init__(self, report: Report, name: str, kind: type[R]) -> None:
        self._report = report
        self._data = report.data["sections"][name]
        self.rows = report.rows(name, kind)

    def row(self, key: str) -> R | None:
        """The row of this key; None: it is not measured yet."""
        return next((row for row in self.rows if row.key == key), None)

    def add(self, row: R) -> None:
        """Append a row and save the report; a row of the same key is replaced.

        Raises:
            ValueError: a number is infinite or not a number: JSON has none of these.
        """
        plain = to_plain(row)
        self._data["rows"] = [old for old in self._data["rows"] if old["key"] != row.key] + [plain]
        self.rows = [old for old in self.rows if old.key != row.key] + [row]
        self._report.save()

    def show(self, tables: Iterable[Table], pictures: Iterable[Picture] = ()) -> None:
        """Set what follows from the rows, and save the report."""
        self._data |= {"tables": [*map(to_plain, tables)], "pictures": [*map(to_plain, pictures)]}
        self._report.save()


class Report:
    """A report and its file.

    Attributes:
        path: where it lies, or will.
        data: its content, as docs/bench.md describes it.
        machine, settings: parts of it.
        sections: name → section, in the order they were begun.
    """

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data
        self.machine: dict[str, Any] = data["machine"]
        self.settings: dict[str, Any] = data["settings"]
        self.sections: dict[str, dict[str, Any]] = data["sections"]

    @classmethod
    def create(
        cls, path: Path, *, command: Sequence[str], machine: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> Report:
        """A new report, saved at once, in place of whatever lay at `path`.

        Args:
            command: the words of the command line; folders are cut off their paths.
            machine: what `edge_pc.bench.facts.machine_facts` gives.
            settings: what all sections share: the model, its sizes, threads.

        Raises:
            OptionError: it cannot be written.
        """
        head = {"format": FORMAT, "created": _now(), "command": command_text(command)}
        body = {"machine": to_plain(dict(machine)), "settings": to_plain(dict(settings)), "sections": {}}
        report = cls(path, head | body)
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
        if not isinstance(data, dict) or not {"format", "machine", "settings", "sections"} <= data.keys():
            raise OptionError(f"{path} is not a report of edge-pc bench")
        if data["format"] != FORMAT:
            raise OptionError(
                f"{path} has format {data['format']!r}, this version reads format {FORMAT}", hint="measure it again"
            )
        return cls(path, data)

    def check_same(self, *, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """See that rows measured now can stand beside those that are there.

        Args:
            machine: what `edge_pc.system.machine` says of the machine that goes on, and `versions`.
            settings: as of `create`.

        Raises:
            OptionError: the report is of another machine or of other settings.
        """
        known, here = _identity(self.machine), _identity(to_plain(dict(machine)))
        differing = [name for name in here if known[name] != here[name]]
        wanted = to_plain(dict(settings))
        differing += [name for name in wanted if self.settings.get(name) != wanted[name]]
        if differing:
            raise OptionError(
                f"{self.path} was measured with another {', '.join(differing)}: rows would not be comparable",
                hint="give another file with -o, or delete this one",
            )

    def rows(self, name: str, kind: type[R]) -> list[R]:
        """The rows of a section; none when there is no such section. OptionError: they are of another kind."""
        return self._read(name, "rows", kind)

    def tables(self, name: str) -> list[Table]:
        """The tables of a section. OptionError: one is malformed."""
        return self._read(name, "tables", Table)

    def pictures(self, name: str) -> list[Picture]:
        """The pictures of a section. OptionError: one is malformed."""
        return self._read(name, "pictures", Picture)

    def _read(self, name: str, field: str, kind: type[T]) -> list[T]:
        try:
            return [from_plain(kind, value) for value in self.sections.get(name, {}).get(field, [])]
        except (TypeError, AttributeError) as exc:
            raise OptionError(f"{self.path}: the {field} of section {name} cannot be read: {exc}") from exc

    def section(
        self,
        name: str,
        kind: type[R],
        title: str,
        settings: Mapping[str, Any],
        *,
        about: str = "",
        command: Sequence[str] = (),
        restart: bool = False,
    ) -> Section[R]:
        """A section to fill: the rows that are there already are kept.

        Args:
            kind: of its rows.
            title: its heading on a page.
            settings: what the bench is run with.
            about: what a reader has to know, in a few sentences.
            command: the words of the command line that fills it.
            restart: throw the section's rows away.

        Raises:
            OptionError: the section was begun with other settings, or holds other rows.
        """
        wanted = to_plain(dict(settings))
        if name not in self.sections or restart:
            head = {"created": _now(), "command": command_text(command), "title": title, "about": about}
            self.sections[name] = head | {"settings": wanted, "rows": [], "tables": [], "pictures": []}
            self.save()
        found = self.sections[name]["settings"]
        differing = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {found.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
            raise OptionError(
                f"section {name} of {self.path} was begun with other settings: {changes}",
                hint="give another file with -o, or --restart to measure the section again",
            )
        return Section(self, name, kind)

    def save(self) -> None:
        """Replace the file by what is known now.

        Raises:
            OptionError: it cannot be written.
        """
        text = json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(self.path) as file:
                file.write(f"{text}\n".encode())
        except OSError as exc:
            raise OptionError(f"the report {self.path} cannot be written: {exc.strerror}") from exc


def _identity(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same when a report goes on. Of the system its name: updates change its release."""
    return {name: machine.get(name) for name in _IDENTITY} | {"system": machine.get("system", "").partition(" ")[0]}


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_text(words: Sequence[str]) -> str:
    """A command line without the folders of its paths, which may hold a person's name; what is not UTF-8 is escaped."""

    def shortened(word: str) -> str:
        option, sign, value = word.rpartition("=")
        return option + sign + (Path(value).name if Path(value).is_absolute() else value)

    return " ".join(map(shortened, words)).encode("utf-8", "backslashreplace").decode()
