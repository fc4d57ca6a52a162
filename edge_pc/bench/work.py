"""What all benches share: the model and the backends, the folder of states, and how a section of a report is filled."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic

from filelock import FileLock, Timeout

from edge_pc.backends import BACKENDS, entry
from edge_pc.bench import facts
from edge_pc.bench.charts import Picture
from edge_pc.bench.report import R, Report, Section
from edge_pc.bench.tables import Table
from edge_pc.engine import Engine
from edge_pc.errors import MissingDependencyError, ModelError, OptionError
from edge_pc.models import registry
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.cpu import allowed_cpus
from edge_pc.system.files import make_private_folder
from edge_pc.system.home import home

STATES_FOLDER = "bench-states"

# What all sections share of a model's facts.
_SIZES = ("architecture", "layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size", "max_positions")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured, and with what.

    Attributes:
        model: as `Engine` takes it.
        gguf: the file for backends that open one; None: of a registered model, its weights as the backend is fast with.
        backends: names; empty: all that are installed.
        threads: compute threads; None: the search chooses.
        cache_dir: where states lie meanwhile, each deleted when it is not needed any more; None: a folder below
            `edge_pc.system.home.home()`, deleted at the end.
    """

    model: str = registry.DEFAULT_MODEL
    gguf: Path | None = None
    backends: tuple[str, ...] = ()
    threads: int | None = None
    cache_dir: Path | None = None

    def chosen_backends(self) -> list[str]:
        """The backends to measure.

        Raises:
            OptionError: there is no such backend.
            MissingDependencyError: a requested backend is not installed.
        """
        installed = [name for name, known in BACKENDS.items() if find_spec(known.import_name)]
        for known in map(entry, self.backends):
            if known.name not in installed:
                extra = f"edge-prompt-cache[{known.extra}]" if known.extra else known.package
                raise MissingDependencyError(
                    f"the {known.title} backend needs {known.package}", hint=f'pip install "{extra}"'
                )
        return list(self.backends) or installed

    def model_path(self, backend: str) -> Path:
        """The file or folder that a backend opens.

        Raises:
            ModelError: there is no such model for this backend.
        """
        kind = entry(backend).model_kind
        if kind == "gguf" and self.gguf is not None:
            return self.gguf
        if kind == "gguf" and not registry.has_name(self.model):
            raise ModelError(f"no GGUF file of {self.model} is known", hint="give one with --gguf FILE")
        fair: Path = entry(backend).load_baseline().fair_weights(registry.locate(self.model, kind))
        return fair


@dataclass(frozen=True, slots=True)
class Work(Generic[R]):
    """What a bench gets to fill its section.

    Attributes:
        report: the whole report; a bench may fill a further section.
        section: its own.
        options: what is measured, and with what.
        backends: to measure.
        folder: for states while they are measured.
        on_progress: told how far the bench is, in pieces of work, and which piece comes next.
        command: the words of the command line.
    """

    report: Report
    section: Section[R]
    options: BenchOptions
    backends: Sequence[str]
    folder: Path
    on_progress: OnProgress = ignore
    command: Sequence[str] = ()

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the bench is."""
        self.on_progress(Progress(done, total, text))

    def engine_options(self, backend: str, threads: int | None = None) -> dict[str, Any]:
        """What an `Engine` on the bench's own states is opened with."""
        path, threads = self.options.model_path(backend), threads or self.options.threads
        return {"model": path, "backend": backend, "cache_dir": self.folder / backend, "threads": threads}

    def engine(self, backend: str, threads: int | None = None) -> Engine:
        """An engine on the bench's own states; the caller closes it."""
        return Engine(**self.engine_options(backend, threads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(Generic[R]):
    """A bench: it fills the section of its name in a report.

    Attributes:
        title: heads the section on a page.
        row: the dataclass of its rows.
        settings: a dataclass with a classmethod `quick`; fields with the metadata `adds_rows` may change later.
        measure: adds rows.
        tables, pictures: what a page shows of them.
        about: what a reader of the section has to know.
        needs_model: it measures backends.
        one_backend: it measures the first backend only.
    """

    title: str
    row: type[R]
    settings: type[Any]
    measure: Callable[[Work[R], Any], None]
    tables: Callable[[Sequence[R]], list[Table]]
    pictures: Callable[[Sequence[R]], list[Picture]] = lambda rows: []
    about: str = ""
    needs_model: bool = True
    one_backend: bool = False


def fill(
    name: str,
    bench: Bench[Any],
    report: Report,
    options: BenchOptions,
    settings: Any,
    on_progress: OnProgress = ignore,
    *,
    command: Sequence[str] = (),
    restart: bool = False,
) -> None:
    """Run one bench into a report; rows that are there are not measured again.

    Args:
        settings: an object of `bench.settings`.
        command: the words of the command line.
        restart: measure the section again.

    Raises:
        OptionError: the section was begun with other settings, or another bench is running.
        ModelError, MissingDependencyError: a backend or its model cannot be opened.
    """
    backends = options.chosen_backends()[: 1 if bench.one_backend else None] if bench.needs_model else []
    asked = {f.name: getattr(settings, f.name) for f in fields(settings) if not f.metadata.get("adds_rows")}
    weights = {name: entry(name).describe(options.model_path(name)).spec.quantization for name in backends}
    asked |= {"threads": options.threads, "weights": weights}
    section = report.section(name, bench.row, bench.title, asked, about=bench.about, command=command, restart=restart)
    with states_folder(options) as folder:
        try:
            bench.measure(Work(report, section, options, backends, folder, on_progress, command), settings)
        finally:
            section.show(bench.tables(section.rows), bench.pictures(section.rows))


def open_report(path: Path, options: BenchOptions, command: Sequence[str]) -> Report:
    """The report at `path`, to go on with, or a new one.

    Raises:
        OptionError: it is of another machine or another model.
    """
    backend = options.chosen_backends()[0]
    spec = asdict(entry(backend).describe(options.model_path(backend)).spec)
    model = {"name": Path(options.model).name, **{name: spec[name] for name in _SIZES}}
    settings = {"model": model, "threads": options.threads or allowed_cpus()}
    machine = facts.machine_facts()
    if not path.exists():
        return Report.create(path, command=command, machine=machine, settings=settings)
    report = Report.load(path)
    report.check_same(machine=machine, settings=settings)
    return report


@contextmanager
def states_folder(options: BenchOptions) -> Iterator[Path]:
    """Where states lie while they are measured: not among a person's own.

    Below the home, not in the system's folder for temporary files: that one is often in memory, and nothing is ever
    cold there. After an interruption the folder is left to the next run, which deletes it.

    Raises:
        OptionError: another bench uses the folder now.
    """
    folder = options.cache_dir or home() / STATES_FOLDER
    make_private_folder(folder)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            yield folder
            if options.cache_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
    except Timeout as exc:
        hint = "wait for it: two at once would disturb each other"
        raise OptionError(f"another bench is running on {folder}", hint=hint) from exc
