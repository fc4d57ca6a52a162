"""Cells of answers that have ended, kept for a while: a conversation that goes on computes only what is new."""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.compose.laid_out import LaidOut
from edge_pc.runtime.live_cells import LiveCells, Tokens

# Cells that have so many tokens of another prompt are copied: that conversation may go on, too.
_FORKED_FROM = 64


@dataclass(slots=True, eq=False)
class Held:
    """Cells of a conversation.

    Attributes:
        cells: of a prompt and its answer.
        kind: only prompts of the same kind may go on in them, see `kind_of`.
        prompt_tokens: how many of them are the prompt's.
    """

    cells: LiveCells
    kind: str
    prompt_tokens: int


class WarmCells:
    """The cells used last. For one thread.

    Args:
        limit: of how many conversations.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Held] = []  # those used last at the end

    def __len__(self) -> int:
        return len(self._held)

    def best(self, kind: str, wanted: Tokens) -> tuple[Held | None, int]:
        """What has most of these tokens from the first on, and how many: never all, the last one gives the logits."""
        best, most = None, 0
        for held in self._held:
            kept = min(held.cells.there.common(wanted), len(wanted) - 1) if held.kind == kind else 0
            if kept >= max(most, 1):
                best, most = held, kept
        return best, most

    def take(self, held: Held, kept: int) -> Held:
        """The cells for a prompt of which they have the first `kept` tokens: themselves, or a copy of them where they
        have much of another prompt."""
        if held.prompt_tokens - kept < _FORKED_FROM:
            self._held.remove(held)
            return held
        return Held(held.cells.fork(), held.kind, held.prompt_tokens)

    def put(self, held: Held) -> None:
        """Keep cells; those that nobody has used for longest may have to go."""
        self._held.append(held)
        while len(self._held) > self._limit:
            self._held.pop(0).cells.close()

    def close(self) -> None:
        """Give up all of them."""
        while self._held:
            self._held.pop().cells.close()


def kind_of(prompt: LaidOut, fidelity: str) -> str:
    """What prompts must have in common to go on in each other's cells, besides their tokens.

    Cells of messages are always those of full prefill. Those of a schema's modules depend on which modules there are,
    and on the fidelity.
    """
    if not prompt.schema.schema.children:
        return "messages"
    return "/".join([fidelity, *(encoding.key for encoding in prompt.encodings)])


def tokens_of(prompt: LaidOut) -> Tokens:
    """All tokens of a prompt, in position order."""
    plan = prompt.computed_plan()
    return Tokens(plan.token_ids, plan.position_ids)
