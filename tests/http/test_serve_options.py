"""What ``asyncspec serve`` makes of its arguments."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.cli import serve
from asyncspec_nodes.cli.serve import ServeOptions
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, LimitsTable
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.http.api.errors import ApiError


def options(*argv: str) -> ServeOptions:
    parser = Parser()
    serve.add_arguments(parser)
    return serve.read_arguments(parser.parse_args(argv))


def test_a_target_from_the_hub_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files lie in a directory that is named after a commit."""
    snapshot = tmp_path / "models--org--fox" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(BUNDLED_TARGET)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    assert options("--target", "org/fox").http.models == ("fox",)
    assert options("--target", "org/fox", "--model-name", "mine").http.models == ("mine",)


def test_a_model_has_several_names() -> None:
    argv = [part for name in ("a", "org/b", "a") for part in ("--served-model-name", name)]
    assert options(*argv, "--model-name", "c").http.models == ("a", "org/b", "c")
    with pytest.raises(SystemExit):
        options("--served-model-name", "")


@pytest.mark.parametrize("target", [(), ("--target", str(BUNDLED_TARGET))])
def test_a_directory_is_the_draft_nodes_to_name(target: tuple[str, ...]) -> None:
    assert options(*target).http.models == ()


def recommending(folder: Path, text: str) -> str:
    """The bundled target with a ``generation_config.json`` of our own."""
    for file in BUNDLED_TARGET.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(text)
    return str(folder)


def test_the_targets_recommendations_are_taken_over_or_not(tmp_path: Path) -> None:
    target = ("--target", recommending(tmp_path, '{"temperature": 0.6}'))
    where = options(*target).where
    assert isinstance(where, Config)
    assert where.target.generation_config == "auto"
    where = options(*target, "--generation-config", "none").where
    assert isinstance(where, Config)
    assert where.target.generation_config == "none"


def test_recommendations_that_make_no_sense_are_said_before_anything_starts(
    tmp_path: Path,
) -> None:
    target = ("--target", recommending(tmp_path, '{"temperature": -1}'))
    with pytest.raises(UserError, match=r"generation_config\.json: temperature is -1"):
        options(*target)
    options(*target, "--generation-config", "none")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--generation-config", "none"), ("--policy", "flowspec"), ("--sessions", "9")],
)
def test_a_running_cluster_has_its_own(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{option} is the running cluster's choice; leave it out"):
        options("--connect", "127.0.0.1:1", option, value)


@pytest.mark.parametrize(("given", "sessions"), [((), 4), (("--sessions", "9"), 9)])
def test_requests_that_are_worked_on_at_a_time(given: tuple[str, ...], sessions: int) -> None:
    where = options(*given).where
    assert isinstance(where, Config)
    assert where.limits.sessions == sessions


def test_keys_share_prompt_prefixes_only_where_the_operator_says_so(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\nother\n")

    def tenants(*argv: str) -> set[str]:
        keys = options("--api-key-file", str(file), *argv).http.keys
        return {keys.check(f"Bearer {key}").tenant for key in ("one", "other")}

    assert len(tenants()) == len(tenants("--share-prefixes", "per-key")) == 2
    assert tenants() == tenants()  # another server with these keys serves the same tenants
    assert not any(key in tenant for key in ("one", "other") for tenant in tenants())
    assert tenants("--share-prefixes", "all") == {""}
    assert options().http.keys.check(None).tenant == ""


def test_keys_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = options("--api-key", "one", "--api-key", "other").http.keys
    assert [keys.check(f"Bearer {key}").name for key in ("one", "other")] == ["key1", "key2"]
    # One with a comma, as the environment may have it; the command line comes first.
    monkeypatch.setattr(Parser, "environment", {"ASYNCSPEC_API_KEY": "a,b"})
    assert options().http.keys.check("Bearer a,b").name == "key1"
    file = tmp_path / "keys"
    file.write_text("of-a-file")
    for argv, key in (
        (("--api-key", "typed"), "typed"),
        (("--api-key-file", str(file)), "of-a-file"),
    ):
        keys = options(*argv).http.keys
        assert keys.check(f"Bearer {key}").name == "key1"
        with pytest.raises(ApiError, match="not one of this service"):
            keys.check("Bearer a,b")


def test_the_context_is_bounded() -> None:
    where = options("-c", "512").where
    assert isinstance(where, Config)
    assert [where.limits.context_of(longest) for longest in (2048, 256)] == [512, 256]
    assert LimitsTable().context_of(2048) == 2048


def test_a_disk_cache_and_api_keys_exclude_each_other() -> None:
    """What is stored is not encrypted."""
    keys = ("--api-key", "a", "--disk-mib", "64")
    with pytest.raises(UserError, match="the disk cache is not encrypted"):
        options(*keys)
    where = options(*keys, "--share-prefixes", "all").where
    assert isinstance(where, Config)
    assert where.cache.disk_mib == 64
