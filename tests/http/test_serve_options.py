"""What ``asyncspec serve`` makes of its arguments."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from asyncspec_nodes.cli import serve_options
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cli.serve_options import ServeOptions
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET


def options(*argv: str) -> ServeOptions:
    parser = Parser()
    serve_options.add_arguments(parser)
    return serve_options.read_arguments(parser.parse_args(argv))


def test_a_target_from_the_hub_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files lie in a directory that is named after a commit."""
    snapshot = tmp_path / "models--org--fox" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(BUNDLED_TARGET)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    assert options("--target", "org/fox").http.model == "fox"
    assert options("--target", "org/fox", "--model-name", "mine").http.model == "mine"


@pytest.mark.parametrize("target", [(), ("--target", str(BUNDLED_TARGET))])
def test_a_directory_is_the_draft_nodes_to_name(target: tuple[str, ...]) -> None:
    assert options(*target).http.model is None
