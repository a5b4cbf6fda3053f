"""Peers' text is shown, and does nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_protocol.errors import MAX_TEXT, RemoteProtocolError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a fault", "a fault"),
        ("Prüfung 漢字 🙂", "Prüfung 漢字 🙂"),
        ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u202eesrever\u2028\ufeff", r"\u202eesrever\u2028\ufeff"),
        ("\ud800", r"\ud800"),
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
        ("x" * (MAX_TEXT + 1), "x" * (MAX_TEXT - 3) + "..."),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT
    assert printable(shown) == shown


def test_an_error_quotes_a_peer_in_one_line() -> None:
    error = RemoteProtocolError("no \x1b[31mname\nhere", peer=3)
    assert str(error) == r"rank 3: no \x1b[31mname\nhere"
