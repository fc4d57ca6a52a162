"""libllama's own log: silent unless asked for, its last error kept for our error messages."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_ERROR = 3  # GGML_LOG_LEVEL_ERROR


class NativeLog:
    """What libllama says.

    Attributes:
        verbose: let it through to stderr.
        last_error: the last line it logged as an error, empty without one.
    """

    def __init__(self) -> None:
        self.verbose = False
        self.last_error = ""
        self._callback: Any = None

    def attach(self, library: ModuleType, *, verbose: bool) -> None:
        """Take the log over from the bindings, which print errors; one log serves the whole process."""
        self.verbose = self.verbose or verbose
        if self._callback is None:
            # The library keeps the pointer, so the callback must live as long as the process.
            self._callback = library.llama_log_callback(self._receive)
            library.llama_log_set(self._callback, None)

    def take_error(self) -> str:
        """The last error, which is then forgotten."""
        error, self.last_error = self.last_error, ""
        return error

    def _receive(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", errors="replace")
        if level == _ERROR:
            self.last_error = line.strip()
        if self.verbose:
            sys.stderr.write(line)


native_log = NativeLog()
