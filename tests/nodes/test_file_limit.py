"""A node raises its limit of open files, or says that it is too low."""

from __future__ import annotations

import resource

import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.cli.main import main
from asyncspec_nodes.node import resources


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 10**6, (8192, 10**6)),
        (256, resource.RLIM_INFINITY, (8192, resource.RLIM_INFINITY)),
        (10**5, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: tuple[int, int] | None
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    resources.raise_file_limit()
    assert given == ([] if then is None else [then])


@pytest.mark.parametrize(
    "command",
    ["run --target toy: --prompt x", "serve --target toy: --port 0", "up --target toy: --port 0"],
)
def test_commands_say_so_before_they_start_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith("asyncspec: this process may open 24 files, and")


def test_too_low_a_limit_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(UserError, match="may open 64 files, and a node needs 256; raise the limit"):
        resources.raise_file_limit()
