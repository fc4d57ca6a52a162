"""The schemas that an engine knows by name, and prompts laid out against them or against files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_pc.compose.composer import Composer, TextModel
from edge_pc.compose.documents import (
    BYTES_PER_TOKEN,
    DocumentReader,
    documents_schema,
    question,
    question_text,
    read_documents,
)
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import SchemaLayout
from edge_pc.errors import OptionError
from edge_pc.pml import Prompt, Schema, Selection, load_schema, parse_prompt, parse_schema, select
from edge_pc.pml.faults import fault
from edge_pc.pml.model import NOWHERE, Node, Role, Text, Turn

# The name of the schema of a conversation that has none.
CONVERSATION = "conversation"

SchemaSource = str | Path | Schema
Files = str | Path | Sequence[str | Path]


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
        model: its spec and chat template.
        composer: lays out for the same model.
    """

    def __init__(self, model: TextModel, composer: Composer) -> None:
        self._model = model
        self._composer = composer
        self._schemas: dict[str, Schema] = {}
        self._reader = DocumentReader()

    def load(self, schema: SchemaSource) -> SchemaLayout:
        """See `Engine.load_schema`."""
        parsed = read_schema(schema)
        layout = self._composer.schema(parsed).layout
        self._schemas[parsed.name] = parsed
        return layout

    def lay_out(self, prompt: str | Prompt) -> LaidOut:
        """See `Engine.lay_out`."""
        return self._composer.compose(*self._select(prompt))

    def _select(self, prompt: str | Prompt) -> tuple[Schema, Selection]:
        """A prompt's schema, and the prompt checked against it."""
        parsed = parse_prompt(prompt) if isinstance(prompt, str) else prompt
        schema = self._schemas.get(parsed.schema)
        if schema is None:
            raise fault(
                f"the schema {parsed.schema!r} is not loaded",
                parsed.at,
                name=parsed.schema,
                among=self._schemas,
                hint="load it with load_schema (Python) or --schema FILE (command line)",
            )
        return schema, select(parsed, schema)

    def lay_out_question(self, text: str, files: Files) -> LaidOut:
        """See `Engine.lay_out_question`."""
        schema, modules = self._documents(files)
        return self._composer.compose(schema, question(text, modules, chat=self._chat))

    def opening(self, prompt: str | Prompt | None, system: str | None, files: Files) -> Opening:
        """What a conversation begins with; see `Engine.session`."""
        paths = [files] if isinstance(files, str | Path) else files
        if (prompt is not None) + (system is not None) + bool(paths) > 1:
            raise OptionError("a conversation begins with a prompt, a system text or files, not with several of them")
        if prompt is not None:
            schema, selection = self._select(prompt)
        elif paths:
            schema, modules = self._documents(paths)
            selection = Selection(modules, at=NOWHERE)
        else:
            schema, selection = _system_schema(system or "", chat=self._chat), Selection((), at=NOWHERE)
        return Opening(self._composer, schema, selection, self._chat)

    @property
    def _chat(self) -> bool:
        return self._model.chat_template.source is not None

    def _documents(self, files: Files) -> tuple[Schema, tuple[str, ...]]:
        """A schema of files, and the paths of all its modules."""
        paths = [files] if isinstance(files, str | Path) else files
        max_bytes = self._model.spec.max_positions * BYTES_PER_TOKEN
        documents = read_documents([Path(path) for path in paths], max_bytes, self._reader.read)
        return documents_schema(documents, chat=self._chat)


def _system_schema(text: str, *, chat: bool) -> Schema:
    """A schema of nothing but a system text, maybe none."""
    children: tuple[Node, ...] = (Text(text, NOWHERE),) if text else ()
    if chat and text:
        children = (Turn("system", children, NOWHERE),)
    return Schema(CONVERSATION, children, NOWHERE)
