"""libllama's own log: silent unless it is wanted, its errors kept for our error messages."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class NativeLog:
    """What libllama says.

    Attributes:
        verbose: let it through to stderr.
    """

    def __init__(self) -> None:
        self.verbose = False
        self._error = ""
        self._callback: Any = None

    def attach(self, library: ModuleType, *, verbose: bool) -> None:
        """Take the log over from the bindings, which print errors; one log serves the whole process."""
        self.verbose = self.verbose or verbose
        if self._callback is None:
            # The library keeps the pointer, so the callback must live as long as the process.
            self._callback = library.llama_log_callback(self._receive)
            library.llama_log_set(self._callback, None)

    def take_error(self) -> str:
        """The first error since the last call, empty without one; later ones only say what failed because of it."""
        error, self._error = self._error, ""
        return error

    def _receive(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", errors="replace")
        if level == _ERROR:
            self._error = self._error or line.strip()
        if self.verbose and sys.stderr:
            sys.stderr.write(line)


native_log = NativeLog()
