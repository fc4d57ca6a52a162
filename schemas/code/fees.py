"""What a late return costs."""

from __future__ import annotations

GRACE_DAYS = 2
CENTS_PER_DAY = 50


def late_fee(price: int, days_late: int) -> int:
    """The fee in cents for a tool of `price` cents: nothing in the days of grace, never more than the tool."""
    if days_late <= GRACE_DAYS:
        return 0
    return min(price, (days_late - GRACE_DAYS) * CENTS_PER_DAY)
