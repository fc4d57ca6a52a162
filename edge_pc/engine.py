"""The public API: an opened model with a store of KV states, and the path of a prompt through it.

PML text → Selection → LaidOut → Plan (cached spans, computed run) → Context → logits → Answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from edge_pc.backends import DEFAULT_BACKEND, entry, open_backend
from edge_pc.compose import choices
from edge_pc.compose.composer import ComposeOptions, Composer
from edge_pc.compose.laid_out import Cited, LaidOut, check_length
from edge_pc.compose.schema_layout import SchemaLayout
from edge_pc.compose.schemas import Schemas, SchemaSource, read_schema
from edge_pc.documents import DocumentReader, Sources
from edge_pc.documents.kept import KeptTexts
from edge_pc.models import registry
from edge_pc.pml import Prompt
from edge_pc.progress import OnProgress
from edge_pc.runtime.answering import Answering, exhaust
from edge_pc.runtime.compare import Comparison, compare_prefills
from edge_pc.runtime.decoding import decode
from edge_pc.runtime.encoder import Encoder, EncodeReport, EncodingSize
from edge_pc.runtime.lifetime import Lifetime
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.serving import Serving
from edge_pc.runtime.session import Session
from edge_pc.runtime.stats import Result
from edge_pc.runtime.stream import Stream
from edge_pc.runtime.watch import Cancelled, Watch
from edge_pc.store import StateStore
from edge_pc.system.home import states_folder

# Of the model's positions, what an answer of no given length is to have at least, where files have to be cut for it.
ANSWER_SHARE = 16


class Engine:
    """A model with a store. Safe to use from several threads; use it as a context manager, or `close` it.

    Args:
        model: a registered model's name, or the path of an exported model's folder or (llama.cpp) of a GGUF file.
        backend: `onnx` or `llamacpp`.
        cache_dir: the store's folder; None: `$EDGE_PC_CACHE_DIR`, or `states` below `$EDGE_PC_HOME`.
        encoding: a module is encoded seeing its guaranteed context, and `neutral` text in the place of modules that
            may stand before it; the `guaranteed` context only; or `isolated`: alone, as in the paper.
        placeholder: what stands in a parameter's slot during encoding: `nothing`, `unk`, `default`.
        tail: free text starts after the last `imported` cell, or after the whole `schema`; `packed`: after the last
            imported cell, and gaps that modules left are closed. None: `packed` where states of the model can be
            moved, else `imported`.
        max_store_bytes: limit of the store; None: no limit.
        verbose: let native libraries log to stderr.
        backend_options: the backend's own options, such as `threads` (`edge_pc.backends.onnx.entry.OnnxOptions`,
            `edge_pc.backends.llamacpp.entry.LlamaCppOptions`).

    Raises:
        ModelError: the model is missing or broken.
        MissingDependencyError: the environment lacks something.
        OptionError: an option is unknown to the backend, or its value is wrong.
    """

    def __init__(
        self,
        model: str | Path = registry.DEFAULT_MODEL,
        *,
        backend: str = DEFAULT_BACKEND,
        cache_dir: Path | str | None = None,
        encoding: choices.EncodingRule = choices.DEFAULT_ENCODING,
        placeholder: choices.Placeholder = choices.DEFAULT_PLACEHOLDER,
        tail: choices.Tail | None = None,
        max_store_bytes: int | None = None,
        verbose: bool = False,
        **backend_options: Any,
    ) -> None:
        compose_options = ComposeOptions(encoding, placeholder, tail)
        path = registry.locate(str(model), entry(backend).model_kind)
        self.backend = open_backend(backend, path, {**backend_options, "verbose": verbose})
        self.spec = self.backend.spec
        self.tokenizer = self.backend.tokenizer
        self.store = StateStore(states_folder(cache_dir), max_bytes=max_store_bytes)
        self.composer = Composer(self.backend, self.backend.kv_layout.name, compose_options)
        self.encoder = Encoder(self.backend, self.store, str(model))
        self._model = str(model)
        self.schemas = Schemas(self.backend, self.composer, DocumentReader(KeptTexts(self.store.path)))
        self._lifetime = Lifetime()
        self.answering = Answering(self.backend, self.encoder, self.store, self._lifetime, self._model)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all work, free the model and close the store; a second time nothing happens.

        Raises:
            EngineError: it is called by the work itself, in a progress callback.
        """
        if self._lifetime.end():
            self.backend.close()
            self.store.close()

    def load_schema(self, schema: SchemaSource) -> SchemaLayout:
        """Read a schema and make it known under its name; a schema of that name is replaced.

        Args:
            schema: a file's path, PML text (it starts with `<`), or a parsed schema.

        Raises:
            PMLError: the schema is wrong.
            ContextLengthError: it is longer than the model's positions.
        """
        self._lifetime.require_open()
        return self.schemas.load(schema)

    def encoding_size(self, schema: SchemaSource) -> EncodingSize:
        """What `encode` would still compute and write."""
        self._lifetime.require_open()
        return self.encoder.size_of_missing(self.composer.schema(read_schema(schema)).encodings.of_schema())

    def encode(self, schema: SchemaSource, progress: OnProgress | None = None) -> EncodeReport:
        """Load a schema (see `load_schema`) and encode its modules in advance; what is already stored is left alone.

        Args:
            progress: called as tokens are computed.

        Raises:
            PMLError, ContextLengthError: as `load_schema`.
        """
        with self._lifetime.work(Watch(progress)) as watch:
            encodings = self.composer.schema(self.load_schema(schema).schema).encodings
            return self.encoder.encode(encodings.of_schema(), watch.report)

    def refine(
        self, prompts: Sequence[str | Prompt] = (), *, uses: int = 2, progress: OnProgress | None = None
    ) -> list[EncodeReport]:
        """Make exact versions for selections of modules that came back, while nobody waits for an answer.

        A module's states are first made without the modules that stand before it in a prompt, so that they serve every
        selection. An exact version is made after those very modules: the next prompt with the same ones in the same
        order, or with the first of them, has the states of full prefill, gaps aside. Ends soon after a prompt comes.

        Args:
            prompts: whose selections are refined, in place of those that came back.
            uses: a selection is refined once this engine has served it so often.
            progress: called as tokens are computed.

        Returns:
            What was made for each selection: in the order of `prompts`, or the one used last first.
        """
        reports: list[EncodeReport] = []
        refining = Watch(progress)
        with self._lifetime.work(refining):
            self.answering.refining = refining
            with suppress(Cancelled):
                selections = [self.lay_out(prompt) for prompt in prompts] or self.answering.selections.used(uses)
                reports.extend(self.encoder.encode(prompt.exact, refining.report) for prompt in selections)
        return reports

    def generate(
        self,
        prompt: str | Prompt,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: OnProgress | None = None,
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
        return exhaust(self.stream(prompt, sampling, serving, progress))

    def stream(
        self,
        prompt: str | Prompt,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: OnProgress | None = None,
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
        with self._lifetime.work(Watch()) as watch, ExitStack() as contexts:
            live = []
            for prompt in prompts:
                answer = self.answering.answer(sampling)
                prefilled = self.answering.prefilled(partial(self.lay_out, prompt), answer, serving, watch)
                live.append(contexts.enter_context(prefilled))
            for _ in decode(self.backend, live):
                self.store.start_checks()
                watch.check()
            return [one.answer.result() for one in live]

    def ask(
        self,
        question: str,
        files: Sources,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: OnProgress | None = None,
        *,
        system: str | None = None,
        cite: bool = False,
    ) -> Result:
        """Answer a question about documents; see `generate`. What was computed of them is kept.

        Where the files are longer than the model's positions, the parts of them are used that are most like the
        question; `result.stats.picked` says which.

        Args:
            files: a file (text, PDF, DOCX, HTML), a folder, a pattern such as `notes/*.md`, a `Document` (text that is
                in no file), or several of these.
            system: tells the model what to do with the documents; None: `DEFAULT_SYSTEM`.
            cite: find out which part of which file the answer is from: `result.source`.

        Raises:
            OptionError: a file has no text or cannot be read, or there is none.
            MissingDependencyError: what reads a file's format is not installed (extra `documents`).
            ContextLengthError: not even a part of the files fits with the question and the answer.
        """
        result = exhaust(self.stream_ask(question, files, sampling, serving, progress, system=system))
        return replace(result, source=self.source_of(question, result, files)) if cite else result

    def stream_ask(
        self,
        question: str,
        files: Sources,
        sampling: Sampling = Sampling(),
        serving: Serving = Serving(),
        progress: OnProgress | None = None,
        *,
        system: str | None = None,
    ) -> Stream:
        """As `ask`, piece by piece."""
        lay_out = partial(self.lay_out_question, question, files, sampling.max_tokens, system)
        return self._stream(lay_out, sampling, serving, progress)

    def source_of(self, question: str, result: Result, files: Sources) -> Cited | None:
        """The part of the files that an answer to a question about them is most likely from.

        It has the most of the words of both; None: no part has any.
        """
        return self.schemas.source_of(question, result.text, files, result.stats.picked)

    def adding_size(self, files: Sources, *, system: str | None = None) -> EncodingSize:
        """What `add` would still compute and write."""
        self._lifetime.require_open()
        return self.encoder.size_of_missing(self.schemas.encodings_of_files(files, system))

    def add(self, files: Sources, progress: OnProgress | None = None, *, system: str | None = None) -> EncodeReport:
        """Prepare files, so that a question about any of them, in any order, computes only itself.

        Args:
            files, system: as of `ask`; whatever else the files are asked about with, `system` must be the same.

        Raises:
            OptionError, MissingDependencyError: as `ask`.
        """
        with self._lifetime.work(Watch(progress)) as watch:
            return self.encoder.encode(self.schemas.encodings_of_files(files, system), watch.report)

    def session(
        self,
        prompt: str | Prompt | None = None,
        *,
        system: str | None = None,
        files: Sources = (),
        serving: Serving = Serving(),
    ) -> Session:
        """Begin a conversation: each of its turns computes only its own tokens. See `Session`.

        Args:
            prompt: PML text or a parsed prompt, its schema loaded: modules and turns to begin with.
            system: or a text that tells the model what to do.
            files: or what the questions are about, as of `ask`.
            serving: what is reused for the first turn, and how.

        Raises:
            PMLError, ContextLengthError: as `generate`.
            OptionError: a file cannot be read as UTF-8 text, or there are several things to begin with.
        """
        self._lifetime.require_open()
        opening = self.schemas.opening(prompt, system, files)
        return self._lifetime.keep(Session.begin(self.answering, opening, serving))

    def resume(self, name: str) -> Session:
        """Go on with a conversation that was saved (`Session.save`): its cells are mapped from the store, those that
        are missing are computed again with its next turn, with a warning.

        Raises:
            OptionError: there is none of this name.
            StoreError: its file is damaged.
            ModelError: it was saved with another model.
        """
        self._lifetime.require_open()
        return self._lifetime.keep(Session.resume(self.answering, self.store.sessions.read(name)))

    def compare(self, prompt: str | Prompt, serving: Serving = Serving()) -> Comparison:
        """Compare reuse with full prefill of the same prompt, in one run; what is not stored is encoded first.

        Args:
            serving: without the cache, states are kept for the comparison only.
        """
        return self._compare(lambda: self.lay_out(prompt), serving)

    def compare_ask(
        self,
        question: str,
        files: Sources,
        serving: Serving = Serving(),
        *,
        max_tokens: int | None = None,
        system: str | None = None,
    ) -> Comparison:
        """As `compare`, for a question about files; `max_tokens` is the answer's, as of `ask`."""
        return self._compare(partial(self.lay_out_question, question, files, max_tokens, system), serving)

    def lay_out(self, prompt: str | Prompt) -> LaidOut:
        """A prompt's tokens and positions, and the encodings that serve it: the first step of every answer.

        Raises:
            PMLError: as `generate`.
        """
        return self.schemas.lay_out(prompt)

    def lay_out_question(
        self, text: str, files: Sources, max_tokens: int | None = None, system: str | None = None
    ) -> LaidOut:
        """As `lay_out`, for a question about files; see `ask`. Room for the answer is kept free."""
        answer_tokens = Sampling(max_tokens).answer_room(self.spec.max_positions // ANSWER_SHARE)
        return self.schemas.lay_out_question(text, files, answer_tokens, system)

    def lay_out_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> LaidOut:
        """As `lay_out`, for a conversation (each message with `role` and `content`) in the model's own template.

        Raises:
            OptionError: the template refuses the messages, or has no place for tools.
            ModelError: the model has no chat template.
        """
        return self.composer.messages(messages, tools)

    def _stream(
        self, lay_out: Callable[[], LaidOut], sampling: Sampling, serving: Serving, progress: OnProgress | None
    ) -> Stream:
        return self.answering.stream(
            lambda answer, watch: self.answering.prefilled(lay_out, answer, serving, watch), sampling, progress
        )

    def _compare(self, lay_out: Callable[[], LaidOut], serving: Serving) -> Comparison:
        with self._lifetime.work(Watch()), TemporaryDirectory(prefix="edge-pc-") as folder:
            prompt = lay_out()
            check_length(prompt, 1, self.spec.max_positions)
            with closing(self.backend.new_context(prompt.tokens)) as context:
                if serving.use_cache:
                    return compare_prefills(context, lay_out, self.encoder, serving.fidelity)
                with StateStore(Path(folder)) as store:
                    encoder = Encoder(self.backend, store, self._model)
                    return compare_prefills(context, lay_out, encoder, serving.fidelity)
