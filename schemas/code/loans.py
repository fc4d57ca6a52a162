"""Lending a tool and taking it back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, timedelta

from .fees import late_fee
from .members import Member
from .tools import Tool

LOAN_DAYS = 7


class Refused(Exception):
    """The tool cannot be lent; the message says why."""


@dataclass
class Loan:
    tool: Tool
    member: Member
    due: date
    returned: date | None = None


@dataclass
class Ledger:
    """All loans, the oldest first."""

    loans: list[Loan] = field(default_factory=list)

    def holder(self, tool: Tool) -> Member | None:
        """Who has the tool now."""
        for loan in reversed(self.loans):
            if loan.tool is tool and loan.returned is None:
                return loan.member
        return None

    def lend(self, tool: Tool, member: Member, today: date) -> Loan:
        if tool.broken:
            raise Refused(f"{tool.name} is broken")
        if not member.may_borrow:
            raise Refused(f"{member.name} owes {member.debt / 100:.2f}")
        if (other := self.holder(tool)) is not None:
            raise Refused(f"{tool.name} is with {other.name}")
        loan = Loan(tool, member, due=today + timedelta(days=LOAN_DAYS))
        self.loans.append(loan)
        return loan

    def take_back(self, loan: Loan, today: date) -> int:
        """Close the loan and charge the member; returns the fee in cents."""
        loan.returned = today
        fee = late_fee(loan.tool.price, days_late=(today - loan.due).days)
        loan.member.charge(fee)
        return fee
