"""The public API: an opened model with a store of KV states, and the path of a prompt through it.

PML text → Selection → PromptLayout → Plan (cached spans, computed run) → Context → logits → Answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edge_pc.backends import entry, open_backend
from edge_pc.backends.base import BackendOptions, DecodeStep
from edge_pc.compose.chat import ChatTemplate
from edge_pc.compose.documents import documents_schema, question, read_documents
from edge_pc.compose.encodings import EncodingOptions, EncodingRule, Placeholder, SchemaEncodings
from edge_pc.compose.prompt_layout import PromptLayout, Tail, check_length, lay_out_prompt
from edge_pc.compose.schema_layout import SchemaLayout, lay_out
from edge_pc.models import registry
from edge_pc.pml import Prompt, Schema, Selection, load_schema, parse_prompt, parse_schema, select
from edge_pc.pml.faults import fault
from edge_pc.runtime.answer import Answer, Stream
from edge_pc.runtime.compare import Comparison, compare_prefills
from edge_pc.runtime.encoder import EncodeCallback, Encoder, EncodeReport, EncodingSize
from edge_pc.runtime.prefill import Serving, prefill
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.stats import Result
from edge_pc.store import StateStore
from edge_pc.system.home import home


@dataclass(frozen=True, slots=True, eq=False)
class _LoadedSchema:
    layout: SchemaLayout
    encodings: SchemaEncodings
    encoder: Encoder


class Engine:
    """A model with a store. Safe to use from several threads; use it as a context manager, or `close` it.

    Args:
        model: a registered model's name, or the path of an exported model's folder or (llama.cpp) of a GGUF file.
        backend: `onnx` or `llamacpp`.
        cache_dir: the store's folder; None: `states` below `$EDGE_PC_HOME`.
        threads: compute threads; None: the CPUs this process may use.
        provider: ONNX Runtime's execution provider.
        assembly: how stored states reach the model: `map`, `copy`, or `auto`.
        kv_storage: dtype of stored states: `float32`, or `float16` at half the size.
        encoding: `guaranteed` context, or `isolated`: each module alone, as in the paper.
        placeholder: what stands in a parameter's slot during encoding: `nothing`, `unk`, `default`.
        tail: free text starts behind the last `imported` cell, or behind the whole `schema`.
        max_store_bytes: limit of the store; None: no limit.
        verbose: let native libraries log to stderr.

    Raises:
        ModelError: the model is missing or broken.
        MissingDependencyError: the environment lacks something.
        OptionError: an option's value is not known.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        backend: str = "onnx",
        cache_dir: Path | str | None = None,
        threads: int | None = None,
        provider: str = "cpu",
        assembly: str = "auto",
        kv_storage: str = "float32",
        encoding: EncodingRule = "guaranteed",
        placeholder: Placeholder = "nothing",
        tail: Tail = "imported",
        max_store_bytes: int | None = None,
        verbose: bool = False,
    ) -> None:
        path = registry.locate(str(model), entry(backend).model_kind)
        options = BackendOptions(threads, provider, assembly, kv_storage, verbose)
        self.backend = open_backend(backend, path, options)
        self.spec = self.backend.spec
        self.store = StateStore(Path(cache_dir or home() / "states"), max_bytes=max_store_bytes)
        self.tokenizer = self.backend.tokenizer
        self._template = ChatTemplate(self.backend.chat_template, self.spec.special_tokens)
        unk = self.spec.special_tokens.get("unk_token")
        self._encoding_options = EncodingOptions(encoding, placeholder, self.tokenizer.id_of(unk) if unk else None)
        self._tail = tail
        self._model = str(model)
        self._schemas: dict[str, _LoadedSchema] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and close the store."""
        self.backend.close()
        self.store.close()

    def load_schema(self, schema: str | Path | Schema) -> SchemaLayout:
        """Read a schema and make it known under its name; a schema of that name is replaced.

        Args:
            schema: a file's path, PML text (it starts with `<`), or a parsed schema.

        Raises:
            PMLError: the schema is wrong.
            ContextLengthError: it is longer than the model's positions.
        """
        loaded = self._load(schema)
        self._schemas[loaded.layout.name] = loaded
        return loaded.layout

    def encoding_size(self, schema: str | Path | Schema | SchemaLayout) -> EncodingSize:
        """What `encode` would still compute and write."""
        return self._load(schema).encoder.missing()

    def encode(
        self, schema: str | Path | Schema | SchemaLayout, progress: EncodeCallback | None = None
    ) -> EncodeReport:
        """Encode a schema's modules in advance; what is stored already is left alone.

        Args:
            schema: as `load_schema` takes it, or what that gave back.
            progress: called as tokens are computed.

        Raises:
            PMLError, ContextLengthError: as `load_schema`.
        """
        return self._load(schema).encoder.encode_all(progress)

    def generate(
        self,
        prompt: str | Prompt,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: EncodeCallback | None = None,
    ) -> Result:
        """Answer a prompt.

        Args:
            prompt: PML text, or a parsed prompt; its schema must be loaded.
            sampling: how tokens are chosen.
            serving: what is reused, and how.
            progress: called before the first token, while what is not stored is computed.

        Raises:
            PMLError: the prompt does not fit its schema.
            ContextLengthError: prompt and answer together are longer than the model's positions.
            CacheMissError: `serving` is strict, and something was not stored.
        """
        return _exhaust(self.stream(prompt, sampling, serving, progress))

    def stream(
        self,
        prompt: str | Prompt,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: EncodeCallback | None = None,
    ) -> Stream:
        """Answer a prompt piece by piece; see `generate`. Errors come with the first piece."""
        return self._stream(lambda: self.lay_out(prompt), sampling, serving, progress)

    def generate_many(
        self, prompts: Sequence[str | Prompt], sampling: Sampling = Sampling(), serving: Serving = Serving()
    ) -> list[Result]:
        """Answer several prompts at once: later tokens of all of them are computed together where the backend can.

        Raises:
            PMLError, ContextLengthError: as `generate`; then none is answered.
        """
        with ExitStack() as opened:
            steps = []
            for prompt in prompts:
                submitted = time.perf_counter()
                encoder, layout = self.lay_out(prompt)
                check_length(layout, sampling.max_tokens, self.spec.max_positions)
                context = self.backend.new_context(layout.tokens + sampling.max_tokens)
                opened.enter_context(closing(context))
                answer = Answer(sampling, self.tokenizer, self.spec.eos_ids)
                answer.begin(prefill(context, layout, encoder, submitted, serving, None))
                steps.append((context, answer))
            while live := [(context, answer) for context, answer in steps if not answer.done]:
                logits = self.backend.decode([DecodeStep(c, answer.token, answer.position) for c, answer in live])
                for (_, answer), row in zip(live, logits, strict=True):
                    answer.take(row)
            return [answer.result() for _, answer in steps]

    def ask(
        self,
        question: str,
        files: Sequence[Path | str],
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: EncodeCallback | None = None,
    ) -> Result:
        """Answer a question about text files; see `generate`. What was computed of the files is kept.

        Raises:
            OptionError: a file cannot be read as UTF-8 text, or there is none.
        """
        return _exhaust(self.stream_ask(question, files, sampling, serving, progress))

    def stream_ask(
        self,
        question: str,
        files: Sequence[Path | str],
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: EncodeCallback | None = None,
    ) -> Stream:
        """Answer a question about text files piece by piece; see `ask`."""
        return self._stream(lambda: self.lay_out_question(question, files), sampling, serving, progress)

    def compare(self, prompt: str | Prompt, *, exact: bool = False) -> Comparison:
        """Set reuse against full prefill of the same prompt, in one run; what is not stored is encoded first."""
        return self._compare(lambda: self.lay_out(prompt), exact)

    def compare_ask(self, question: str, files: Sequence[Path | str], *, exact: bool = False) -> Comparison:
        """As `compare`, for a question about files."""
        return self._compare(lambda: self.lay_out_question(question, files), exact)

    def _stream(
        self,
        lay_out: Callable[[], tuple[Encoder, PromptLayout]],
        sampling: Sampling,
        serving: Serving,
        progress: EncodeCallback | None,
    ) -> Stream:
        """The path of a prompt: lay out, prefill, answer."""
        answer = Answer(sampling, self.tokenizer, self.spec.eos_ids)

        def pieces() -> Generator[str, None, None]:
            submitted = time.perf_counter()
            encoder, prompt = lay_out()
            check_length(prompt, sampling.max_tokens, self.spec.max_positions)
            with closing(self.backend.new_context(prompt.tokens + sampling.max_tokens)) as context:
                if piece := answer.begin(prefill(context, prompt, encoder, submitted, serving, progress)):
                    yield piece
                while not answer.done:
                    (logits,) = self.backend.decode([DecodeStep(context, answer.token, answer.position)])
                    if piece := answer.take(logits):
                        yield piece

        return Stream(pieces(), answer)

    def _compare(self, lay_out: Callable[[], tuple[Encoder, PromptLayout]], exact: bool) -> Comparison:
        _, prompt = lay_out()
        check_length(prompt, 1, self.spec.max_positions)
        with closing(self.backend.new_context(prompt.tokens)) as context:
            return compare_prefills(context, lay_out, exact=exact)

    def lay_out(self, prompt: str | Prompt) -> tuple[Encoder, PromptLayout]:
        """A prompt's tokens and positions, and what gets its states: the first step of every answer.

        Raises:
            PMLError: as `generate`.
        """
        parsed = parse_prompt(prompt) if isinstance(prompt, str) else prompt
        if parsed.schema not in self._schemas:
            raise fault(
                f"the schema {parsed.schema!r} is not loaded",
                parsed.at,
                name=parsed.schema,
                among=self._schemas,
                hint="load it with load_schema (Python) or --schema FILE (command line)",
            )
        loaded = self._schemas[parsed.schema]
        return self._lay_out_selection(loaded, select(parsed, loaded.layout.schema))

    def lay_out_question(self, text: str, files: Sequence[Path | str]) -> tuple[Encoder, PromptLayout]:
        """As `lay_out`, for a question about files; see `ask`."""
        chat = self.backend.chat_template is not None
        schema, modules = documents_schema(read_documents([Path(file) for file in files]), chat=chat)
        return self._lay_out_selection(self._load(schema), question(text, modules, chat=chat))

    def _lay_out_selection(self, loaded: _LoadedSchema, selection: Selection) -> tuple[Encoder, PromptLayout]:
        prompt = lay_out_prompt(selection, loaded.encodings, loaded.layout, self.tokenizer, self._template, self._tail)
        return loaded.encoder, prompt

    def _lay_out_schema(self, schema: str | Path | Schema) -> SchemaLayout:
        spec = self.spec
        return lay_out(
            _read_schema(schema), self.tokenizer, self._template, bos_id=spec.bos_id, max_positions=spec.max_positions
        )

    def _load(self, schema: str | Path | Schema | SchemaLayout) -> _LoadedSchema:
        layout = schema if isinstance(schema, SchemaLayout) else self._lay_out_schema(schema)
        identity = (self.spec.fingerprint, self.backend.kv_layout.name)
        encodings = SchemaEncodings(layout, identity, self._encoding_options)
        return _LoadedSchema(layout, encodings, Encoder(self.backend, self.store, layout, encodings, self._model))


def _read_schema(schema: str | Path | Schema) -> Schema:
    if isinstance(schema, Schema):
        return schema
    if isinstance(schema, str) and schema.lstrip().startswith("<"):
        return parse_schema(schema)
    return load_schema(Path(schema))


def _exhaust(stream: Stream) -> Result:
    for _ in stream:
        pass
    return stream.result
