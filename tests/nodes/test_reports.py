"""What a node writes into its log."""

from __future__ import annotations

import pytest

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.node.reports import Reporter


@pytest.mark.parametrize(
    "word", ["\x1b[2Jgone", "\x9bgone\u202e", "\x1b gone\n\u2028", "gone" * 999]
)
def test_a_peers_words_stay_on_their_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Reporter(1, None).log.warning("unlinked", peer=0, why=word)
    written = capsys.readouterr().err
    assert written.endswith("\n")
    assert written[:-1].isprintable()
    assert "gone" in written
    assert len(written) < 1200


def test_an_error_that_quotes_a_node_does_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli._print_error("the node is gone: \x1b]0;title\x07\u202e\nok", 1) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == r"asyncspec: the node is gone: \x1b]0;title\x07\u202e ok"
