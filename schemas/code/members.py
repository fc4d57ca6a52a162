"""Members of the club and what they owe."""

from __future__ import annotations

from dataclasses import dataclass

DEBT_LIMIT = 1500  # cents; above it a member cannot borrow


@dataclass
class Member:
    """A member; `debt` is in cents."""

    name: str
    debt: int = 0

    def charge(self, cents: int) -> None:
        if cents < 0:
            raise ValueError("a charge cannot be negative")
        self.debt += cents

    def pay(self, cents: int) -> int:
        """Pay off debt; returns the change."""
        change = max(0, cents - self.debt)
        self.debt -= cents - change
        return change

    @property
    def may_borrow(self) -> bool:
        return self.debt <= DEBT_LIMIT
