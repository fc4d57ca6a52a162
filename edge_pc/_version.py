"""The version, in the one place that states it: pyproject.toml reads it from here (reading it back from the installed
metadata would cost every start about 20 ms)."""

__version__ = "0.1.0"
