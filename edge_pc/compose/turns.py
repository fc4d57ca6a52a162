"""Turns as tokens: what a model's template writes around texts is tokenized in one piece between two of them."""

from __future__ import annotations

from collections.abc import Sequence

from edge_pc.compose.conversation import Conversation
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.model import Role


class TurnWriter:
    """Writes turns one after the other.

    Args:
        template, tokenizer: the model's.
        roles: of the turns that stand before.
        bos_id: the very first turn's BOS is left out: it stands at position 0 already. None: there is none.
        boundary: nothing stands before.

    Attributes:
        token_ids: what was written.
        text_start: where in it the text of the last turn begins.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        roles: Sequence[Role] = (),
        *,
        bos_id: int | None = None,
        boundary: bool = False,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._conversation = Conversation(template, roles)
        self._bos_id = bos_id if not roles else None
        self._boundary = boundary
        self._between = ""
        self.token_ids: list[int] = []
        self.text_start = 0

    def follow_answer(self) -> None:
        """An answer stands before, in the turn that the model was asked to make; its end is not written yet."""
        self._conversation.open("assistant")
        self._between = self._conversation.close()

    def turn(self, role: Role, text: str) -> None:
        """Write a turn, all but what ends it.

        Raises:
            OptionError, ModelError: as `Conversation.open`.
        """
        marks = self._between + self._conversation.open(role)
        self.token_ids += template_ids(self._tokenizer, marks, self._bos_id, boundary=self._boundary)
        self._bos_id, self._boundary = None, False
        self.text_start = len(self.token_ids)
        after_mark = not self.token_ids or self._tokenizer.is_control(self.token_ids[-1])
        self.token_ids += self._tokenizer.encode(text, boundary=after_mark)
        self._between = self._conversation.close()

    def ask(self) -> None:
        """End the last turn, and write the mark that makes the model answer."""
        marks = self._between + self._conversation.finish() + self._template.generation_prompt
        self.token_ids += self._tokenizer.encode_template(marks)


def template_ids(tokenizer: Tokenizer, prefix: str, bos_id: int | None, *, boundary: bool) -> list[int]:
    """Tokens of what a template writes before a turn.

    Args:
        bos_id: for the first turn: a BOS that the template writes is left out, the layout has put it at position 0.
        boundary: nothing, or a control token, stands before it.
    """
    token_ids = tokenizer.encode_template(prefix, boundary=boundary)
    return token_ids[1:] if bos_id is not None and token_ids[:1] == [bos_id] else token_ids
