"""Every error that edge_pc raises on purpose.

One base class, few subclasses. A message says what was wrong, where, and what was expected; `hint` says what to do.
`exit_code` is what the CLI exits with: 2 for wrong input, 3 for an environment that lacks something.
"""

from __future__ import annotations

from pathlib import Path

# Characters of a message.
_LONGEST = 2000


class EdgePCError(Exception):
    """Base of all errors raised by edge_pc.

    Args:
        message: what was wrong, where, and what was expected.
        hint: what the person can do about it.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = _shortened(message)
        self.hint = None if hint is None else _shortened(hint)

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


def _shortened(text: str) -> str:
    """`text` with its middle left out where it is too long to be read: names in it come from files, of any length."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 4 :]}"


class PMLError(EdgePCError):
    """A fault in a schema or a prompt: not well-formed, an unknown name, a missing argument, …

    Args:
        message: what was wrong.
        source: the file, or None for text given directly and for what was not read from a text.
        line: 1-based line, or None where no single place is at fault.
        column: 1-based column.
        name: the module, parameter or schema at fault.
        nearest: the nearest valid name, if one is close.
        hint: what to do.
    """

    def __init__(
        self,
        message: str,
        *,
        source: Path | str | None = None,
        line: int | None = None,
        column: int | None = None,
        name: str | None = None,
        nearest: str | None = None,
        hint: str | None = None,
    ) -> None:
        place = "" if source is None else f"{source}: "
        if line is not None:
            place = f"{source or '<text>'}:{line}:{column or 1}: "
        suggestion = f" (did you mean {nearest!r}?)" if nearest else ""
        super().__init__(f"{place}{message}{suggestion}", hint=hint)
        self.source = source
        self.line = line
        self.column = column
        self.name = name
        self.nearest = nearest


class ContextLengthError(EdgePCError):
    """A schema or a prompt needs more positions than the model has. The message lists each part's tokens."""


class ModelError(EdgePCError):
    """A model file or folder is missing, broken, or of a kind that cannot be served; or an export failed."""


class StatesError(EdgePCError):
    """Stored KV states are not what was expected: truncated, foreign, corrupted. The engine then computes instead."""


class EngineError(EdgePCError):
    """An engine is used after it was closed, or in a process that it was not opened in."""


class CacheMissError(EdgePCError):
    """Strict mode: states of a module were not in the store. The message gives each module's reason."""


class OptionError(EdgePCError):
    """An option or argument has a value that cannot be used."""


class MissingDependencyError(EdgePCError):
    """The environment lacks something: an extra that is not installed, an execution provider, a library."""

    exit_code = 3


class StoreError(EdgePCError):
    """The store cannot be written or read: full disk, read-only or missing folder. Answers are computed instead."""

    exit_code = 3
