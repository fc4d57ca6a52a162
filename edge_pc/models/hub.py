"""Models of the Hugging Face Hub, by name: `ORG/NAME`, or `ORG/NAME:CHOICE` for one of its GGUF files.

`huggingface_hub` does the work: its cache, login, mirror (`HF_ENDPOINT`) and offline mode (`HF_HUB_OFFLINE`) are the
person's own. A connection that breaks is taken up again, and a next try keeps the files that came whole. Only what an
export or llama.cpp reads is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.errors import MissingDependencyError, ModelError
from edge_pc.models.hashes import sha256
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*?)(@(?P<revision>[\w./-]+))?(:(?P<choice>[\w./+ -]+))?")

# Of a repository with safetensors: what an export reads, smallest first.
_CONFIG = "config.json"
_TEXT_FILES = (
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_INDEX = "model.safetensors.index.json"
_SPLIT = re.compile(r"-\d+-of-\d+\.gguf$", re.IGNORECASE)

OnCheck = Callable[[Path], object]
OnStart = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repo: `ORG/NAME`.
        revision: a branch, tag or commit; None for the main branch.
        choice: a GGUF file of it, or what tells its name from others, as `Q4_K_M`; None: the safetensors.
    """

    repo: str
    revision: str | None = None
    choice: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.choice}" if self.choice else "")


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a repository: its name, bytes, and the SHA-256 that the Hub gives, or None for small ones."""

    name: str
    nbytes: int
    sha256: str | None


def hub_model(name: str) -> HubModel | None:
    """What a name says, if it is one of the Hub."""
    match = _NAME.fullmatch(name)
    return HubModel(match["repo"], match["revision"], match["choice"]) if match else None


def pulled(model: HubModel) -> Path | None:
    """The GGUF file or the folder of a model, if it is whole in the Hub's cache; the network is not asked."""
    snapshot = _snapshot(model)
    if snapshot is None:
        return None
    if model.choice is not None:
        files = [_File(path.relative_to(snapshot).as_posix(), 0, None) for path in snapshot.rglob("*.gguf")]
        chosen = _matching(model.choice, files)
        return snapshot / chosen[0].name if len(chosen) == 1 else None
    return snapshot if _is_whole_folder(snapshot) else None


def pull_hub(
    model: HubModel, progress: OnProgress = ignore, *, starting: OnStart | None = None, check: OnCheck | None = None
) -> Path:
    """Bring a model to this machine; what is there already is only checked.

    Args:
        progress: in bytes, of each step: the name of the file, `check`.
        starting: called with the bytes of all files, unless the model is here.
        check: called with the folder as soon as its `config.json` is there, and before the large files come. What it
            raises ends the download.

    Returns:
        The GGUF file, or the folder with `config.json`, safetensors and tokenizer.

    Raises:
        ModelError: there is no such repository or file, it needs a login, it does not hold what is needed, or a file
            came damaged.
        MissingDependencyError: the Hub cannot be reached, and the model is not here.
    """
    from huggingface_hub import constants

    here = pulled(model)
    if constants.HF_HUB_OFFLINE:
        if here is None:
            raise MissingDependencyError(
                f"the model {str(model)!r} is not on this machine, and HF_HUB_OFFLINE forbids to get it",
                hint="unset HF_HUB_OFFLINE, or give the path of a model",
            )
        return here
    with _hub_errors(model):
        files = _listed(model)
    wanted = _wanted(model, files)
    if here is None and starting is not None:
        starting(sum(file.nbytes for file in wanted))
    paths = []
    for file in wanted:
        with _hub_errors(model):
            paths.append(_get(model, file, progress))
        if file.name == _CONFIG and check is not None:
            check(paths[-1].parent)
    _check_sums(model, wanted, paths, progress)
    return paths[0] if model.choice is not None else paths[0].parent


def cached_models() -> list[tuple[HubModel, Path]]:
    """What of the Hub's cache can be exported or run: names and GGUF files or folders."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    found: list[tuple[HubModel, Path]] = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id.lower()):
        snapshot = _snapshot(HubModel(repo.repo_id))
        if snapshot is None:
            continue
        if _is_whole_folder(snapshot):
            found.append((HubModel(repo.repo_id), snapshot))
        ggufs = sorted(snapshot.rglob("*.gguf"))
        found += [(HubModel(repo.repo_id, None, path.relative_to(snapshot).as_posix()), path) for path in ggufs]
    return found


def _snapshot(model: HubModel) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Without a pattern it would ask for all files of the repository, which were never wanted.
        return Path(snapshot_download(model.repo, revision=model.revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None


def _is_whole_folder(folder: Path) -> bool:
    """Whether a snapshot holds config, tokenizer and all safetensors."""
    from edge_pc.models.fields import read_json

    if not all((folder / name).is_file() for name in (_CONFIG, "tokenizer.json")):
        return False
    if not (folder / _INDEX).is_file():
        return (folder / "model.safetensors").is_file()
    names = read_json(folder / _INDEX).get("weight_map")
    return isinstance(names, dict) and all((folder / str(name)).is_file() for name in set(names.values()))


def _listed(model: HubModel) -> list[_File]:
    """The files of the repository."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True)
    return [_file(sibling) for sibling in info.siblings or ()]


def _file(sibling: RepoSibling) -> _File:
    return _File(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)


def _wanted(model: HubModel, files: Sequence[_File]) -> list[_File]:
    ggufs = sorted((file for file in files if file.name.lower().endswith(".gguf")), key=lambda file: file.nbytes)
    if model.choice is not None:
        return [_chosen_gguf(model, model.choice, ggufs)]
    weights = [file for file in files if _SAFETENSORS.fullmatch(file.name)]
    names = {file.name: file for file in files}
    if _CONFIG in names and weights:
        small = [names[name] for name in (*_TEXT_FILES, _INDEX) if name in names]
        return [*small, *sorted(weights, key=lambda file: file.name)]
    if ggufs:
        raise ModelError(
            f"{model.repo} holds GGUF files, and one must be chosen: {_listing(ggufs)}",
            hint=f"edge-pc pull {model.repo}:{_short(ggufs[0].name)}",
        )
    raise ModelError(
        f"{model.repo} holds neither GGUF files nor a model in safetensors (config.json, model.safetensors)",
        hint="most models have another repository that does",
    )


def _chosen_gguf(model: HubModel, choice: str, ggufs: Sequence[_File]) -> _File:
    if not ggufs:
        raise ModelError(f"{model.repo} holds no GGUF file", hint=f"for its safetensors: edge-pc pull {model.repo}")
    chosen = _matching(choice, ggufs)
    if not chosen:
        raise ModelError(f"{model.repo} holds no GGUF file {choice!r}, but: {_listing(ggufs)}")
    if any(_SPLIT.search(file.name) for file in chosen):
        raise ModelError(
            f"{model.repo} holds {choice!r} in {len(chosen)} files, and only GGUF files in one piece can be read",
            hint="join them with llama-gguf-split --merge, and give the path of the result",
        )
    if len(chosen) > 1:
        raise ModelError(
            f"{choice!r} means several files of {model.repo}: {_listing(chosen)}", hint="give the whole name"
        )
    return chosen[0]


def _matching(choice: str, files: Sequence[_File]) -> list[_File]:
    """The file of that name, or those whose name says it between marks: `Q4_K` is not in `m-Q4_K_M.gguf`."""
    exact = [file for file in files if choice in (file.name, file.name.rpartition("/")[2])]
    said = re.compile(rf"(?<![a-z0-9_]){re.escape(choice)}(?![a-z0-9_])", re.IGNORECASE)
    return exact or [file for file in files if said.search(file.name)]


def _listing(files: Sequence[_File]) -> str:
    return ", ".join(f"{file.name} ({format_size(file.nbytes)})" for file in files)


def _short(name: str) -> str:
    """The type of the weights as GGUF files name it, or the whole name."""
    match = re.search(r"(?<![a-z0-9])((iq|q)\d\w*|b?f(16|32))(?=\.gguf$)", name, re.IGNORECASE)
    return match[1] if match else name


def _get(model: HubModel, file: _File, progress: OnProgress) -> Path:
    """A file's path in the Hub's cache, downloaded unless it is there."""
    from huggingface_hub import hf_hub_download

    bar = _reporting(file, progress)
    return Path(hf_hub_download(model.repo, file.name, revision=model.revision, tqdm_class=bar))


def _reporting(file: _File, progress: OnProgress) -> Any:
    """A bar as `huggingface_hub` asks for, which draws nothing and reports."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.n = options.get("initial") or 0

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            progress(Progress(int(self.n), file.nbytes, file.name))

    return Reporting


def _check_sums(model: HubModel, files: Sequence[_File], paths: Sequence[Path], progress: OnProgress) -> None:
    for file, path in zip(files, paths, strict=True):
        if file.sha256 is not None and sha256(path, progress) != file.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ModelError(
                f"{file.name} of {model.repo} is damaged, and was removed: its SHA-256 is not {file.sha256}",
                hint=f"edge-pc pull {model} gets it again",
            )


@contextmanager
def _hub_errors(model: HubModel) -> Iterator[None]:
    """Errors of `huggingface_hub` in our words."""
    from huggingface_hub import constants, utils
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Whichever package that is in this version.
    http_error: type[Exception] = utils.httpx.HTTPError  # type: ignore[attr-defined]

    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError as exc:
        raise ModelError(
            f"{model.repo} is open only to those who accepted its terms",
            hint=f"accept them at {hub}/{model.repo}, then log in: hf auth login, or set HF_TOKEN",
        ) from exc
    except RepositoryNotFoundError as exc:
        raise ModelError(
            f"there is no model {model.repo!r} at {hub}, or it is private",
            hint="check the name; for a private one log in: hf auth login, or set HF_TOKEN",
        ) from exc
    except RevisionNotFoundError as exc:
        raise ModelError(f"{model.repo} has no revision {model.revision!r}") from exc
    except HFValidationError as exc:
        raise ModelError(f"{model.repo!r} cannot be the name of a model on {hub}: {exc}") from exc
    except (HfHubHTTPError, http_error, LocalEntryNotFoundError, ConnectionError, TimeoutError) as exc:
        raise MissingDependencyError(
            f"{hub} cannot be reached or does not serve {model.repo}: {exc}",
            hint="is there a network? Files that came whole are kept for the next try",
        ) from exc
