"""The composer: what a schema and a prompt become for an opened model.

It owns all that composing depends on besides the text itself: tokenizer, chat template, positions, the rule of
encoding. Schemas are composed once for each content, however often and from wherever they come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from edge_pc.checks import check_choice
from edge_pc.compose.choices import (
    DEFAULT_ENCODING,
    DEFAULT_PLACEHOLDER,
    ENCODING_RULES,
    PLACEHOLDERS,
    TAILS,
    EncodingRule,
    Placeholder,
    Tail,
)
from edge_pc.compose.encodings import EncodingOptions, SchemaEncodings
from edge_pc.compose.laid_out import LaidOut, lay_out_prompt
from edge_pc.compose.messages import STORED_FROM, Message, MessageWriter, lay_out_ids
from edge_pc.compose.neutral import neutral_text
from edge_pc.compose.schema_layout import SchemaLayout, lay_out
from edge_pc.errors import OptionError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml import Schema, Selection

# Schemas kept composed, those used last. `ask` makes one for each set of files.
_KEPT_SCHEMAS = 32


class TextModel(Protocol):
    """What of a model composing needs: an opened backend has it, and so has a description without weights."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate: ...


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """How prompts are composed.

    Attributes:
        encoding: a module is encoded seeing its guaranteed context, and `neutral` text in the place of modules that
            may stand before it; the `guaranteed` context only; or `isolated`: alone, as in the paper.
        placeholder: what stands in a parameter's slot during encoding: `nothing`, `unk`, `default`.
        tail: free text starts after the last `imported` cell, or after the whole `schema`; `packed`: after the last
            imported cell, and gaps that modules left are closed. None: `packed` where states of the model can be
            moved, else `imported`.

    Raises:
        OptionError: a value is not known.
    """

    encoding: EncodingRule = DEFAULT_ENCODING
    placeholder: Placeholder = DEFAULT_PLACEHOLDER
    tail: Tail | None = None

    def __post_init__(self) -> None:
        check_choice("encoding", self.encoding, ENCODING_RULES)
        check_choice("placeholder", self.placeholder, PLACEHOLDERS)
        if self.tail is not None:
            check_choice("tail", self.tail, TAILS)


@dataclass(frozen=True, slots=True, eq=False)
class ComposedSchema:
    """A schema's tokens and positions, and which parts are encoded together."""

    layout: SchemaLayout
    encodings: SchemaEncodings


class Composer:
    """Composes prompts for one model. Safe to use from several threads.

    Args:
        model: its spec, tokenizer and chat template.
        layout_name: identifies the backend's KV layout; part of every store key. Empty where nothing is stored.
        options: how.

    Raises:
        OptionError: the model has no `<unk>` token, which `options` ask for.
    """

    def __init__(self, model: TextModel, layout_name: str = "", options: ComposeOptions = ComposeOptions()) -> None:
        self._model = model
        self._identity = (model.spec.fingerprint, layout_name)
        unk = model.spec.special_tokens.get("unk_token")
        unk_id = model.tokenizer.id_of(unk) if unk else None
        neutral_ids = model.tokenizer.encode(neutral_text()) if options.encoding == "neutral" else ()
        fixed = model.spec.position.fixed
        if options.tail == "packed" and fixed:
            raise OptionError(
                f"tail 'packed': states of this model cannot be moved: {fixed}", hint="use tail 'imported'"
            )
        self._encoding = EncodingOptions(
            options.encoding, options.placeholder, unk_id, tuple(neutral_ids), model.spec.max_positions, not fixed
        )
        self._tail: Tail = options.tail or ("imported" if fixed else "packed")
        self._writer = MessageWriter(model.chat_template, model.tokenizer, model.spec.bos_id)
        self._lock = threading.Lock()
        self._composed: OrderedDict[Schema, ComposedSchema] = OrderedDict()

    @property
    def neutral_tokens(self) -> int:
        """How many tokens of neutral text a module is encoded after."""
        return len(self._encoding.neutral_ids)

    def schema(self, schema: Schema) -> ComposedSchema:
        """Compose a schema; the same content is composed once.

        Raises:
            ContextLengthError: it is longer than the model's positions.
            PMLError: a parameter's default text is longer than the parameter.
            ModelError: it has chat tags, and the model has no chat template.
        """
        with self._lock:
            composed = self._composed.get(schema) or self._compose(schema)
            self._composed[schema] = composed
            self._composed.move_to_end(schema)
            if len(self._composed) > _KEPT_SCHEMAS:
                self._composed.popitem(last=False)
        return composed

    def compose(self, schema: Schema, selection: Selection) -> LaidOut:
        """A checked prompt's tokens and positions, and the encodings that serve it.

        Raises:
            PMLError: an argument is longer than its parameter; the prompt has no text at all.
            EdgePCError: the chat template refuses the order of roles; or as `schema`.
        """
        composed, model = self.schema(schema), self._model
        return lay_out_prompt(
            selection, composed.encodings, composed.layout, model.tokenizer, model.chat_template, self._tail
        )

    def messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> LaidOut:
        """A conversation that the model is to go on with, as its own template writes it.

        Raises:
            OptionError: the template refuses the messages, or has no place for tools.
            ModelError: the model has no chat template.
        """
        ids = self._writer.ids(messages, tools, answer=True)
        before_last: list[int] = []
        if len(ids) > STORED_FROM and len(messages) > 1:
            with suppress(OptionError):  # a template may refuse a conversation that ends there
                before_last = self._writer.ids(messages[:-1], tools, answer=False)
        return lay_out_ids(ids, self._writer.cuts(ids, before_last), self._identity, self._encoding)

    def text(self, text: str) -> LaidOut:
        """A plain text that the model is to go on with; nothing of it is stored."""
        return self.ids(self._writer.plain_ids(text))

    def ids(self, ids: Sequence[int]) -> LaidOut:
        """Token ids that the model is to go on with; nothing of them is stored.

        Raises:
            OptionError: there is none, or one that the model does not have.
        """
        unknown = [id_ for id_ in ids if not 0 <= id_ < self._model.spec.vocab_size]
        if unknown:
            raise OptionError(
                f"{unknown[0]} is no token id: the model's go from 0 to {self._model.spec.vocab_size - 1}"
            )
        return lay_out_ids(ids, (), self._identity, self._encoding)

    def _compose(self, schema: Schema) -> ComposedSchema:
        model = self._model
        layout = lay_out(
            schema,
            model.tokenizer,
            model.chat_template,
            bos_id=model.spec.bos_id,
            max_positions=model.spec.max_positions,
        )
        return ComposedSchema(layout, SchemaEncodings(layout, self._identity, self._encoding))
