"""The schemas that an engine knows by name, and prompts laid out against them or against files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_pc.compose.choices import DEFAULT_SYSTEM
from edge_pc.compose.composer import Composer, TextModel
from edge_pc.compose.document_questions import Questions
from edge_pc.compose.documents import documents_schema, question_text
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import Cited, LaidOut, PickedParts
from edge_pc.compose.schema_layout import SchemaLayout
from edge_pc.documents import DocumentReader, Sources
from edge_pc.errors import OptionError
from edge_pc.pml import Prompt, Schema, Selection, load_schema, parse_prompt, parse_schema, select
from edge_pc.pml.faults import fault
from edge_pc.pml.model import NOWHERE, Location, Node, Role, Text, Turn

# The name of the schema of a conversation that has none.
CONVERSATION = "conversation"

SchemaSource = str | Path | Schema


def read_schema(schema: SchemaSource) -> Schema:
    """A parsed schema, from a file's path, PML text (it starts with `<`), or as it is.

    Raises:
        PMLError: the schema is wrong.
    """
    if isinstance(schema, Schema):
        return schema
    if isinstance(schema, str) and schema.lstrip().startswith("<"):
        return parse_schema(schema)
    return load_schema(Path(schema))


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """What a conversation begins with, before its first question.

    Attributes:
        schema, selection: modules, and turns of the prompt's own.
        chat: turns are written in the model's chat template; else as questions and answers in plain text.
    """

    composer: Composer
    schema: Schema
    selection: Selection
    chat: bool

    @property
    def roles(self) -> tuple[Role, ...]:
        """Whose turns stand before the first question."""
        own = tuple(piece.role or "user" for piece in self.selection.free_text) if self.chat else ()
        return self.composer.schema(self.schema).layout.roles + own

    def ask(self, text: str) -> LaidOut:
        """The prompt that goes on with a question.

        Raises:
            OptionError: the chat template refuses the order of roles.
            EdgePCError: as `Composer.compose`.
        """
        pieces = (*self.selection.free_text, question_text(text, chat=self.chat))
        return self.composer.compose(self.schema, replace(self.selection, free_text=pieces))

    def encodings(self) -> list[Encoding]:
        """What can be encoded before the first question."""
        return self.composer.schema(self.schema).encodings.of_prompt(self.selection.modules)


class Schemas:
    """Schemas by name. Safe to use from several threads.

    Args:
        model: its spec, tokenizer and chat template.
        composer: lays out for the same model.
        reader: of documents.
    """

    def __init__(self, model: TextModel, composer: Composer, reader: DocumentReader) -> None:
        self._model = model
        self._composer = composer
        self._schemas: dict[str, Schema] = {}
        self._reader = reader
        self._questions = Questions(model, composer)

    def load(self, schema: SchemaSource) -> SchemaLayout:
        """See `Engine.load_schema`."""
        parsed = read_schema(schema)
        layout = self._composer.schema(parsed).layout
        self._schemas[parsed.name] = parsed
        return layout

    @property
    def names(self) -> list[str]:
        """Of the schemas that are loaded."""
        return list(self._schemas)

    def named(self, name: str, at: Location = NOWHERE) -> Schema:
        """The schema of this name.

        Args:
            at: where it is named, for messages.

        Raises:
            PMLError: there is none.
        """
        schema = self._schemas.get(name)
        if schema is None:
            raise fault(
                f"the schema {name!r} is not loaded",
                at,
                name=name,
                among=self._schemas,
                hint="load it with load_schema (Python) or --schema FILE (command line)",
            )
        return schema

    def lay_out(self, prompt: str | Prompt) -> LaidOut:
        """See `Engine.lay_out`."""
        return self._composer.compose(*self._select(prompt))

    def _select(self, prompt: str | Prompt) -> tuple[Schema, Selection]:
        """A prompt's schema, and the prompt checked against it."""
        parsed = parse_prompt(prompt) if isinstance(prompt, str) else prompt
        schema = self.named(parsed.schema, parsed.at)
        return schema, select(parsed, schema)

    def lay_out_question(self, text: str, files: Sources, answer_tokens: int, system: str | None) -> LaidOut:
        """See `Engine.lay_out_question`."""
        return self._questions.lay_out(text, self._reader.read(files), answer_tokens, _system(system))

    def encodings_of_files(self, files: Sources, system: str | None) -> list[Encoding]:
        """See `Engine.add`."""
        return self._questions.encodings(self._reader.read(files), _system(system))

    def source_of(self, text: str, answer: str, files: Sources, picked: Sequence[PickedParts]) -> Cited | None:
        """See `Engine.source_of`."""
        return self._questions.source(text, answer, self._reader.read(files), picked)

    def opening(self, prompt: str | Prompt | None, system: str | None, files: Sources) -> Opening:
        """What a conversation begins with; see `Engine.session`."""
        has_files = files not in ((), [])
        if (prompt is not None) + (system is not None) + has_files > 1:
            raise OptionError("a conversation begins with a prompt, a system text or files, not with several of them")
        if prompt is not None:
            schema, selection = self._select(prompt)
        elif has_files:
            schema, modules = documents_schema(self._reader.read(files), chat=self._chat)
            selection = Selection(modules, at=NOWHERE)
        else:
            schema, selection = _system_schema(system or "", chat=self._chat), Selection((), at=NOWHERE)
        return Opening(self._composer, schema, selection, self._chat)

    @property
    def _chat(self) -> bool:
        return self._model.chat_template.source is not None


def _system(text: str | None) -> str:
    return DEFAULT_SYSTEM if text is None else text


def _system_schema(text: str, *, chat: bool) -> Schema:
    """A schema of nothing but a system text, maybe none."""
    children: tuple[Node, ...] = (Text(text, NOWHERE),) if text else ()
    if chat and text:
        children = (Turn("system", children, NOWHERE),)
    return Schema(CONVERSATION, children, NOWHERE)
