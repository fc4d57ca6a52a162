"""What is known of a backend before its library is loaded, so that commands can list, explain and check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.base import Backend
    from edge_pc.models.description import Description

ModelKind = Literal["onnx", "gguf"]


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend.

    Attributes:
        name: what it is called by (`--backend NAME`).
        title: what people call it.
        model_kind: what it opens: an exported folder (`onnx`) or a GGUF file (`gguf`).
        package: the library that it needs, as pip spells it, and `import_name`, as Python does.
        extra: the extra of this package that installs it; None: it always is.
        options: a frozen dataclass of its options; it checks their values.
        open: opens a model with these options.
        describe: what of a model deals with text, read without its weights.
        probe: loads the library and computes a little with it; facts for people, by name. A library built for another
            CPU kills the process, so it is called in its own process.
        baseline: the module that benches measure this backend with; `load_baseline` says what it has.
    """

    name: str
    title: str
    model_kind: ModelKind
    package: str
    import_name: str
    extra: str | None
    options: type[Any]
    open: Callable[[Path, Any], Backend[Any]]
    describe: Callable[[Path], Description]
    probe: Callable[[], dict[str, str]]
    baseline: str

    def load_baseline(self) -> Any:
        """The module `baseline`. It has:

        - `FullPrefill(model, threads, capacity)`: full prefill by the backend's library alone, with
          `prefill(token_ids, settings)` (int32 `[n]` → logits of the last token, float32 `[vocab]`) and `close()`;
        - `CHOICES`: the settings to try, those of the engine first;
        - `fair_weights(model)`: the file or folder to measure, made if need be;
        - `kernels(instruction_sets)`: the instruction sets that its library uses on such a CPU, in words.
        """
        return import_module(self.baseline)

    def make_options(self, values: Mapping[str, Any]) -> Any:
        """The backend's options from values by name.

        Raises:
            OptionError: the backend has no such option, or a value is wrong.
        """
        known = [field.name for field in fields(self.options)]
        for name in values:
            if name not in known:
                raise OptionError(f"the backend {self.name} has no option {name}; it has: {', '.join(known)}")
        return self.options(**values)
