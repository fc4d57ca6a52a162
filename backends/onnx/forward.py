"""One forward pass: an ONNX Runtime session, and its inputs and outputs bound to an arena."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.onnx.arena import Arena
from edge_pc.errors import MissingDependencyError, ModelError
from edge_pc.models.spec import ModelSpec
from edge_pc.system.cpu import allowed_cpus

if TYPE_CHECKING:
    import onnxruntime

MODEL_FILE = "model.onnx"

_QUERY = "query."  # begins the names of the outputs that are queries

_FATAL, _WARNING = 4, 2  # ONNX Runtime's log levels

_NO_BIAS: NDArray[np.float32] = np.zeros((1, 1, 1, 1), dtype=np.float32)


def open_session(folder: Path, *, threads: int | None, provider: str, verbose: bool) -> onnxruntime.InferenceSession:
    """Open the exported model in `folder`.

    Raises:
        MissingDependencyError: the installed onnxruntime has no such execution provider.
        ModelError: the graph or its weights cannot be loaded.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or allowed_cpus()
    options.inter_op_num_threads = 1
    # The exported graph is made of fused operations already; looking for more takes a fifth of the loading time.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The arena allocator keeps the largest block of every shape ever seen; prompts have every length.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.log_severity_level = _WARNING if verbose else _FATAL
    providers = _providers(provider)
    path = folder / MODEL_FILE
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as exc:  # onnxruntime's own exceptions share no public base
        raise ModelError(f"{path} cannot be loaded: {exc}", hint="export the model again") from exc


def _providers(provider: str) -> list[str]:
    """ONNX Runtime's names of the providers to try, the CPU last since it runs what another cannot."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    names = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    if provider not in names:
        hint = 'pip install "onnxruntime-gpu" in place of onnxruntime' if provider == "cuda" else "use --provider cpu"
        raise MissingDependencyError(
            f"the installed onnxruntime {onnxruntime.__version__} has no execution provider {provider!r}; "
            f"it has: {', '.join(sorted(names))}",
            hint=hint,
        )
    return list(dict.fromkeys([names[provider], "CPUExecutionProvider"]))


class Forward:
    """Runs a session over one arena. Past and present KV are bound once; only the small inputs change."""

    def __init__(self, session: onnxruntime.InferenceSession, spec: ModelSpec, arena: Arena) -> None:
        self._session = session
        self._arena = arena
        self._layers = spec.layers
        self._logits: Logits = np.zeros((1, spec.vocab_size), dtype=np.float32)
        self._binding = self._bound()
        self._binding.bind_ortvalue_output("logits", _ort_value(self._logits))

    def __call__(self, token_ids: IntArray, position_ids: IntArray) -> Logits:
        """Compute tokens after all present cells; returns a copy of the last one's logits, float32 `[vocab]`."""
        self._run(self._binding, token_ids, position_ids)
        logits: Logits = self._logits[0].copy()
        return logits

    def queries(self, token_ids: IntArray, position_ids: IntArray) -> dict[int, NDArray[np.float32]]:
        """Compute tokens after all present cells; returns their queries, float32 `[n, heads × head_dim]`, by layer."""
        names = [output.name for output in self._session.get_outputs() if output.name.startswith(_QUERY)]
        binding = self._bound()
        for name in names:
            binding.bind_output(name)
        self._run(binding, token_ids, position_ids)
        values = binding.get_outputs()[-len(names) :]
        return {int(name.removeprefix(_QUERY)): v.numpy()[0] for name, v in zip(names, values, strict=True)}

    def _bound(self) -> Any:
        """A binding of the arena, without other outputs."""
        binding = self._session.io_binding()
        for layer in range(self._layers):
            for index, part in enumerate(("key", "value")):
                value = _ort_value(self._arena.kv[layer, index][np.newaxis])
                binding.bind_ortvalue_input(f"past_key_values.{layer}.{part}", value)
                binding.bind_ortvalue_output(f"present.{layer}.{part}", value)
        return binding

    def _run(self, binding: Any, token_ids: IntArray, position_ids: IntArray) -> None:
        slots = self._arena.take(token_ids, position_ids)
        bias = self._bias(position_ids, slots)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": token_ids[np.newaxis].astype(np.int64),
            "position_ids": position_ids[np.newaxis].astype(np.int64),
            "seqlens_k": np.array([slots.stop - 1], dtype=np.int32),
            "total_sequence_length": np.array(slots.stop, dtype=np.int32),
            "biased": np.array(bias is not None),
            "attention_bias": _NO_BIAS if bias is None else bias,
        }
        values = {name: _ort_value(array) for name, array in inputs.items()}  # kept alive until the run is over
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        self._session.run_with_iobinding(binding)

    def _bias(self, position_ids: IntArray, slots: slice) -> NDArray[np.float32] | None:
        """What hides cells with larger positions, float32 `[1, 1, new, present]`; None when slots already do."""
        present = self._arena.position_ids[: slots.stop]
        if slots.start == 0 or present[: slots.start].max() <= position_ids[0]:
            return None
        hidden = present[np.newaxis, :] > position_ids[:, np.newaxis]
        bias: NDArray[np.float32] = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return bias[np.newaxis, np.newaxis]


def _ort_value(array: NDArray[Any]) -> Any:
    """An OrtValue that shares the array's memory."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
