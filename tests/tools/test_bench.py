"""Every benchmark loads and describes itself; ``make nightly`` runs each."""

from __future__ import annotations

import pytest

from tools.bench.__main__ import KINDS, main


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_takes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([kind, "--help"])
    assert caught.value.code == 0
    assert "--record" in capsys.readouterr().out
