"""How the reading of PML says what is wrong: one exception with its place, its name and the nearest valid name."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from edge_pc.errors import PMLError

if TYPE_CHECKING:
    from edge_pc.pml.model import Location

# Levels of elements in one another: more than any sensible schema has, and few enough for Python's stack.
MAX_DEPTH = 64

_LISTED_NAMES = 20

# XML 1.0 (fifth edition), production 5, without the colon: what can stand as a tag or an attribute.
_START = (
    r"A-Z_a-z\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u02FF\u0370-\u037D\u037F-\u1FFF\u200C-\u200D\u2070-\u218F"
    r"\u2C00-\u2FEF\u3001-\uD7FF\uF900-\uFDCF\uFDF0-\uFFFD\U00010000-\U000EFFFF"
)
_NAME = re.compile(rf"[{_START}][{_START}\-.0-9\u00B7\u0300-\u036F\u203F-\u2040]*")


def fault(
    message: str, at: Location, *, name: str | None = None, among: Iterable[str] = (), hint: str | None = None
) -> PMLError:
    """The error for a fault at `at`; the nearest of the names `among` to `name` becomes its suggestion."""
    meant = None if name is None else nearest(name, (candidate for candidate in among if candidate != name))
    if name is not None and meant is not None and normal(meant) == normal(name):
        hint = "the two look alike but differ in their Unicode form (NFC and NFD)"
    return PMLError(
        message,
        source=at.source,
        line=at.line or None,
        column=at.column or None,
        name=name,
        nearest=meant,
        hint=hint,
    )


def too_deep(what: str, at: Location, *, name: str | None = None) -> PMLError:
    """The error for an element or a node that is nested more than `MAX_DEPTH` levels deep."""
    hint = "put some of the inner modules beside the outer ones"
    return fault(f"{what} is nested more than {MAX_DEPTH} levels deep", at, name=name, hint=hint)


def nearest(name: str, among: Iterable[str]) -> str | None:
    """The name that a person who wrote `name` most likely meant, or None when none is close; case is ignored."""
    by_folded = {candidate.casefold(): candidate for candidate in among}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def listed(names: Collection[str]) -> str:
    """`names` for a hint; of many only the first."""
    more = len(names) - _LISTED_NAMES
    return ", ".join([*names][:_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def normal(name: str) -> str:
    """`name` in the Unicode form that names are compared in: `é` can be written as one character or as two."""
    return unicodedata.normalize("NFC", name)


def is_name(text: str) -> bool:
    """Whether `text` can be written as a tag or an attribute: an XML name without a colon."""
    return _NAME.fullmatch(text) is not None
