"""What all benches share: the model and the backends, the folder of states, and how a section of a report is filled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from filelock import FileLock, Timeout

from edge_pc.backends import BACKENDS, entry
from edge_pc.bench import facts
from edge_pc.bench.report import R, Report, Section
from edge_pc.engine import Engine
from edge_pc.errors import MissingDependencyError, ModelError, OptionError
from edge_pc.models import registry
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.cpu import allowed_cpus
from edge_pc.system.home import make_home

if TYPE_CHECKING:
    from edge_pc.bench.benches import Measuring

STATES_FOLDER = "bench-states"
LLAMA_QUANT = "q8_0"

# What all sections share of a model's facts.
_SIZES = ("architecture", "layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size", "max_positions")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured, and with what.

    Attributes:
        model: as `Engine` takes it.
        gguf: the file for the llama.cpp backend; None: of a registered model, its weights in Q8_0 (made once).
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

    @contextmanager
    def engine(self, backend: str, threads: int | None = None) -> Iterator[Engine]:
        """An engine on the bench's own states."""
        path = model_path(self.options, backend)
        threads = threads or self.options.threads
        with Engine(path, backend=backend, cache_dir=self.folder / backend, threads=threads) as engine:
            yield engine


def fill(
    name: str,
    bench: Measuring,
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
        settings: an object of the bench's `Settings`.
        command: the words of the command line.
        restart: measure the section again.

    Raises:
        OptionError: the section was begun with other settings, or another bench is running.
        ModelError, MissingDependencyError: a backend or its model cannot be opened.
    """
    backends = chosen_backends(options)[: 1 if bench.one_backend else None] if bench.needs_model else []
    # Settings that only add rows may change later.
    asked = {f.name: getattr(settings, f.name) for f in fields(settings) if not f.metadata.get("adds_rows")}
    weights = {name: entry(name).describe(model_path(options, name)).spec.quantization for name in backends}
    asked |= {"threads": options.threads, "weights": weights}
    module = bench.load()
    section = report.section(name, bench.row, bench.title, asked, about=bench.about, command=command, restart=restart)
    with states_folder(options) as folder:
        work: Work[Any] = Work(report, section, options, backends, folder, on_progress, command)
        try:
            module.measure(work, settings)
        finally:
            pictures = getattr(module, "pictures", lambda rows: ())
            section.show(module.tables(section.rows), pictures(section.rows))


def open_report(path: Path, options: BenchOptions, command: Sequence[str]) -> Report:
    """The report at `path`, to go on with, or a new one.

    Raises:
        OptionError: it is of another machine or another model.
    """
    backend = chosen_backends(options)[0]
    spec = asdict(entry(backend).describe(model_path(options, backend)).spec)
    model = {"name": Path(options.model).name, **{name: spec[name] for name in _SIZES}}
    settings = {"model": model, "threads": options.threads or allowed_cpus()}
    machine = facts.machine_facts()
    if not path.exists():
        return Report.create(path, command=command, machine=machine, settings=settings)
    report = Report.load(path)
    report.check_same(machine=machine, settings=settings)
    return report


def chosen_backends(options: BenchOptions) -> list[str]:
    """The backends to measure.

    Raises:
        OptionError: there is no such backend.
        MissingDependencyError: a requested backend is not installed.
    """
    installed = [name for name, known in BACKENDS.items() if find_spec(known.import_name)]
    for known in map(entry, options.backends):
        if known.name not in installed:
            extra = f"edge-prompt-cache[{known.extra}]" if known.extra else known.package
            raise MissingDependencyError(
                f"the {known.title} backend needs {known.package}", hint=f'pip install "{extra}"'
            )
    return list(options.backends) or installed


def model_path(options: BenchOptions, backend: str) -> Path:
    """The file or folder that a backend opens.

    For llama.cpp the weights of a registered model are brought to Q8_0 first: as precise as our 8 bit, and of all
    quantizations the one with fast kernels everywhere (Q4_1, in which SmolLM2 comes, has none).

    Raises:
        ModelError: there is no such model for this backend.
    """
    if entry(backend).model_kind == "onnx":
        return registry.locate(options.model, "onnx")
    if options.gguf is not None:
        return options.gguf
    if options.model not in registry.REGISTRY:
        raise ModelError(f"no GGUF file of {options.model} is known", hint="give one with --gguf FILE")
    from edge_pc.backends.llamacpp.requantize import requantize, requantized_path

    source = registry.locate(options.model, "gguf")
    made = requantized_path(source, LLAMA_QUANT)
    return made if made.is_file() else requantize(source, made, LLAMA_QUANT)


@contextmanager
def states_folder(options: BenchOptions) -> Iterator[Path]:
    """Where states lie while they are measured: not among a person's own.

    Below the home, not in the system's folder for temporary files: that one is often in memory, and nothing is ever
    cold there. After an interruption the folder is left to the next run, which deletes it.

    Raises:
        OptionError: another bench uses the folder now.
    """
    folder = options.cache_dir or make_home() / STATES_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise OptionError(
            f"another bench is running on {folder}", hint="wait for it: two at once would disturb each other"
        ) from exc
    try:
        yield folder
        if options.cache_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()
