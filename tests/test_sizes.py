from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_pc.errors import OptionError
from edge_pc.system.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        (" 1.5 KiB ", 1536),
        (".5k", 512),
        ("1TB", 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1e9", "1 2", "5PB", "GiB", "1,5G", "inf", "nan", "٣", "9" * 30, "1.2.3"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (188743680, "180.0 MiB"), (2**50, "1024.0 TiB")],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 2**50))
def test_what_is_printed_can_be_read_and_is_close(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.06)


@given(st.text())
def test_any_text_is_a_size_or_refused(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert parse_size(text) >= 0
