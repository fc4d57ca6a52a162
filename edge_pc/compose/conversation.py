"""The turns of a conversation, written one after the other in the way of a model's chat template.

A template may have no place for a system turn, or for two turns of one role in a row, as a schema's turn and a prompt's
may well be. Such a turn is merged with another, a blank line between them: the system's text opens the next turn of the
user, and of two turns of one role the second goes on in the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_pc.errors import ModelError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.pml.model import Role

_BLANK_LINE = "\n\n"


class Conversation:
    """What stands around the texts of turns, in order.

    What ends a turn is written late where the next turn may go on in it.

    Args:
        template: of the model.
        roles: of turns that have been written.

    Attributes:
        role: whose turn the last one is for the template; None before the first.
        goes_on: the last turn goes on in the one before it.
        merges: for each kind of turn that had to be merged, why.
    """

    def __init__(self, template: ChatTemplate, roles: Sequence[Role] = ()) -> None:
        self._template = template
        self._opens_the_next = False  # a system turn that is written as the beginning of the user's
        self._ending = ""
        self._unwritten = ""
        self.role: Role | None = None
        self.goes_on = False
        self.merges: list[str] = []
        for role in roles:
            self.open(role)
            self.close()

    def open(self, role: Role) -> str:
        """What stands between the text before a turn of `role` and its own; the very first mark may be a BOS.

        Raises:
            OptionError: the template refuses the turn.
            ModelError: there is no template, or it is broken.
        """
        after = self.role
        again = role == after and not self._template.accepts(role, after)
        as_user = role == "system" and not again and not self._template.accepts(role, after)
        self.role = "user" if as_user else role
        self.goes_on = again or (self.role == after and (self._opens_the_next or not self._accepts_another()))
        self._note(role, as_user)
        self._opens_the_next = as_user
        if self.goes_on:
            return _BLANK_LINE
        affixes = self._template.affixes(self.role, after)
        self._ending, unwritten = affixes.suffix, self._unwritten
        return unwritten + affixes.prefix

    def close(self) -> str:
        """What ends the turn that is open; empty where the next turn may go on in it."""
        may_go_on = self._opens_the_next or not self._accepts_another()
        self._unwritten = self._ending if may_go_on else ""
        return "" if may_go_on else self._ending

    def finish(self) -> str:
        """What ends the conversation after its last turn was closed."""
        unwritten, self._unwritten = self._unwritten, ""
        return unwritten

    def _accepts_another(self) -> bool:
        return self.role is None or self._template.accepts(self.role, self.role)

    def _note(self, role: Role, as_user: bool) -> None:
        note = ""
        if as_user:
            note = "has no place for a system turn here: its text opens the user's turn"
        elif self.goes_on and not self._opens_the_next:
            note = f"takes no two {role} turns in a row: they are written as one"
        if note and note not in self.merges:
            self.merges.append(note)


def check_turns(template: ChatTemplate, roles: Sequence[Role]) -> list[str]:
    """Compare the turns of a conversation, written one by one, with what the template writes for all of them.

    Returns:
        What the template has no place for, and how it is written instead.

    Raises:
        OptionError: the template refuses this sequence of roles; the message has its own complaint.
        ModelError: there is no template, it is broken, or what it writes for a turn depends on the other turns.
    """
    conversation = Conversation(template)
    turns: list[tuple[Role, str]] = []
    written = ""
    for index, role in enumerate(roles):
        text = f"SENTINEL{index}TURN"
        written += conversation.open(role) + text + conversation.close()
        if conversation.goes_on:
            turns[-1] = (turns[-1][0], turns[-1][1] + _BLANK_LINE + text)
        else:
            turns.append((conversation.role or role, text))
    if turns and written + conversation.finish() != template.render(turns):
        raise ModelError(
            f"what the model's chat template writes for the turns {', '.join(roles)} depends on the turns around "
            "them, so it cannot be put together turn by turn"
        )
    return conversation.merges
