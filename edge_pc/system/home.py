"""The folder of everything that edge_pc keeps: models, and states unless another folder is given."""

from __future__ import annotations

import os
from pathlib import Path

from edge_pc.errors import OptionError

HOME_VARIABLE = "EDGE_PC_HOME"
STATES_VARIABLE = "EDGE_PC_CACHE_DIR"

# The folder of saved conversations in that of states, and what the states of their cells are listed under.
SESSIONS = "sessions"


def home() -> Path:
    """The folder of models and states: `$EDGE_PC_HOME`, or the platform's user cache.

    Raises:
        OptionError: the variable holds a relative path, which would mean another folder in every working directory.
    """
    given = os.environ.get(HOME_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise OptionError(f"{HOME_VARIABLE} is {given!r}, expected an absolute path")
        return path
    import platformdirs

    return platformdirs.user_cache_path("edge-pc", appauthor=False)


def states_folder(given: Path | str | None = None) -> Path:
    """The folder of stored states: the one given, `$EDGE_PC_CACHE_DIR`, or `states` below `home()`; `~` is a home."""
    folder = given or os.environ.get(STATES_VARIABLE)
    return Path(folder).expanduser() if folder else home() / "states"
