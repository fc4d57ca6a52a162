"""The schemas that an engine knows by name, and prompts laid out against them or against files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_pc.compose.choices import DEFAULT_SYSTEM
from edge_pc.compose.composer import Composer, TextModel
from edge_pc.compose.document_questions import Questions
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import Cited, LaidOut, PickedParts
from edge_pc.compose.schema_layout import SchemaLayout
from edge_pc.documents import DocumentReader, Sources
from edge_pc.pml import Prompt, Schema, load_schema, parse_prompt, parse_schema, select
from edge_pc.pml.faults import fault

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


class Schemas:
    """Schemas by name. Safe to use from several threads.

    Args:
        model: its spec, tokenizer and chat template.
        composer: lays out for the same model.
        reader: of documents.
    """

    def __init__(self, model: TextModel, composer: Composer, reader: DocumentReader) -> None:
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

    def lay_out(self, prompt: str | Prompt) -> LaidOut:
        """See `Engine.lay_out`."""
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
        return self._composer.compose(schema, select(parsed, schema))

    def lay_out_question(self, text: str, files: Sources, answer_tokens: int, system: str | None) -> LaidOut:
        """See `Engine.lay_out_question`."""
        return self._questions.lay_out(text, self._reader.read(files), answer_tokens, _system(system))

    def encodings_of_files(self, files: Sources, system: str | None) -> list[Encoding]:
        """See `Engine.add`."""
        return self._questions.encodings(self._reader.read(files), _system(system))

    def source_of(self, text: str, answer: str, files: Sources, picked: Sequence[PickedParts]) -> Cited | None:
        """See `Engine.source_of`."""
        return self._questions.source(text, answer, self._reader.read(files), picked)


def _system(text: str | None) -> str:
    return DEFAULT_SYSTEM if text is None else text
