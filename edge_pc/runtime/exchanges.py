"""What a conversation has come to, as a value: its tokens, and its questions and answers.

To *drop* the oldest turns is to take out the tokens from the first question's text up to that of the question which is
to be the first: the mark before the first question stays, and serves the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_pc.compose.composer import TextModel
from edge_pc.compose.documents import question_text
from edge_pc.compose.turns import TurnWriter
from edge_pc.errors import ContextLengthError
from edge_pc.pml.model import Role
from edge_pc.runtime.live_cells import NO_TOKENS, Tokens
from edge_pc.runtime.sampling import DEFAULT_MAX_TOKENS, Sampling

# Where turns are dropped, so many that this share of the positions is free: not every later turn must drop one.
FREED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer.

    Attributes:
        question, answer: their texts.
        start: how many tokens stand before the turn.
        text_start: how many stand before the question's text: the template's marks are between the two.
    """

    question: str
    answer: str
    start: int
    text_start: int


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What a conversation has come to.

    Attributes:
        tokens: all of it, the opening included; the mark that ends the last answer comes with the next question.
        exchanges: the oldest first. Of one that waits for its answer, that is empty.
    """

    tokens: Tokens = NO_TOKENS
    exchanges: tuple[Exchange, ...] = ()

    @property
    def turns(self) -> tuple[tuple[Role, str], ...]:
        """(role, text) of questions and answers."""
        said: list[tuple[Role, str]] = []
        for exchange in self.exchanges:
            said += [("user", exchange.question), ("assistant", exchange.answer)]
        return tuple(said)

    def answered(self, text: str, token_ids: Sequence[int]) -> State:
        """With the answer to the last question."""
        *before, last = self.exchanges
        return State(self.tokens.plus(token_ids), (*before, replace(last, answer=text)))

    def without(self, count: int) -> State:
        """Without the oldest `count` exchanges."""
        if not count:
            return self
        target, kept = self.exchanges[0].text_start, self.exchanges[count:]
        dropped = (kept[0].text_start if kept else len(self.tokens)) - target
        moved = [replace(e, start=e.start - dropped, text_start=e.text_start - dropped) for e in kept]
        if moved:
            moved[0] = replace(moved[0], start=self.exchanges[0].start)
        tokens = self.tokens.first(target).plus(self.tokens.token_ids[target + dropped :])
        return State(tokens, tuple(moved))


class Manner:
    """How turns are written.

    Args:
        model: its tokenizer and chat template.
        roles: of the turns in the opening.
        chat: in the model's chat template; else as questions and answers in plain text.

    Attributes:
        roles, chat: as given.
    """

    def __init__(self, model: TextModel, roles: Sequence[Role], *, chat: bool) -> None:
        self._model = model
        self.roles = tuple(roles)
        self.chat = chat

    def asked(self, state: State, question: str) -> State:
        """A state that has been begun, with a question more, ready to be answered.

        Raises:
            OptionError: the question is empty, or the template has no place for it.
        """
        text = question_text(question, chat=self.chat).text
        token_ids, text_start = self._turn_ids(text, len(state.exchanges)) if self.chat else (self._plain_ids(text), 0)
        start = len(state.tokens)
        exchange = Exchange(question, "", start, start + text_start)
        return State(state.tokens.plus(token_ids), (*state.exchanges, exchange))

    def _plain_ids(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text)

    def _turn_ids(self, text: str, answers: int) -> tuple[list[int], int]:
        """Tokens of a user's turn and of the mark for its answer; where its text begins.

        Without an answer before, the mark before the text is there already.
        """
        earlier: list[Role] = ["user", "assistant"] * answers
        writer = TurnWriter(self._model.chat_template, self._model.tokenizer, [*self.roles, *earlier[:-1]])
        if answers:
            writer.follow_answer()
        writer.turn("user", text)
        writer.ask()
        if answers:
            return writer.token_ids, writer.text_start
        return writer.token_ids[writer.text_start :], 0


def with_room_for(
    state: State, question: str, manner: Manner, sampling: Sampling, max_positions: int
) -> tuple[State, int]:
    """Ask a question, without the oldest turns where there is no room for it and its answer; how many are dropped.

    Raises:
        ContextLengthError: there is no room without them either.
    """
    wanted = sampling.answer_room(DEFAULT_MAX_TOKENS)
    asked = manner.asked(state, question)
    if asked.tokens.end + wanted <= max_positions:
        return asked, 0
    shorter = [manner.asked(state.without(count), question) for count in range(1, len(state.exchanges) + 1)]
    needs = [each.tokens.end + wanted for each in shorter]
    for limit in (max_positions * (1 - FREED_SHARE), max_positions):
        for count, needed in enumerate(needs):
            if needed <= limit:
                return shorter[count], count + 1
    shortest = shorter[-1] if shorter else asked
    left = sampling.answer_room(max_positions - shortest.tokens.end)
    if shortest.tokens.end + left <= max_positions:
        return shortest, len(shorter)
    raise _too_long(shortest, left, max_positions)


def _too_long(shortest: State, answer: int, max_positions: int) -> ContextLengthError:
    before = shortest.exchanges[0].text_start
    own, end = len(shortest.tokens) - before, shortest.tokens.end + answer
    return ContextLengthError(
        f"the beginning of the conversation takes {before} tokens, the question {own} and the answer {answer}, at "
        f"positions up to {end}; the model has room for {max_positions}",
        hint="shorten the question, ask for fewer tokens, or begin another conversation",
    )
