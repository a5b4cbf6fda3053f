"""``asyncspec plan layers`` as a user types it, ``layers = "auto"``, and running nodes' reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import commands
from asyncspec.backend.base import StageOptions
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.placement.model import HANDLING_SECONDS
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cli.planning.device_sources import from_statuses
from asyncspec_nodes.cluster.config import layout
from asyncspec_nodes.cluster.file import load, parse
from asyncspec_nodes.cluster.placement import target_cost, with_layers
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Role, Status

EXAMPLE = Path(__file__).resolve().parents[2] / "nodes" / "examples" / "plans" / "layers.toml"
TOY = "toy:layers=8"
TARGET = ("--target", TOY, "--context", "64", "--policy", "autoregressive")


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return commands.json_output(capsys, "plan", "layers", *argv, "--json")


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    return commands.usage_error(capsys, "plan", "layers", *argv)


def machine(name: str, more: str = "layer_ms=10") -> tuple[str, str]:
    return "--machine", f"{name}:memory_gib=1,{more}"


def spans(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {stage["device"]: tuple(stage["layers"]) for stage in found["stages"]}


def test_layers_go_by_speed_and_the_rest_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    two = (*machine("slow", "layer_ms=30"), *machine("fast"))
    found = answer(capsys, *TARGET, *two)
    assert spans(found) == {"slow": (0, 2), "fast": (2, 8)}
    assert sorted(round(stage["pass_ms"]) for stage in found["stages"]) == [60, 60]
    speeds = found["tokens_per_second"]
    assert speeds["plain"] == pytest.approx(1 / (0.12 + 3 * HANDLING_SECONDS), rel=1e-6)
    # The same without speculation on the virtual clock.
    assert speeds["autoregressive"] == pytest.approx(speeds["plain"], rel=0.05)
    assert cli.main(["plan", "layers", *TARGET, *two, "--policy", "flow"]) == 0
    text = capsys.readouterr().out
    assert "predicted: 8.1 tokens/s plain" in text
    assert "with flow" in text
    found = answer(capsys, *TARGET, *two, "--best-for", "plain")
    assert spans(found) == {"fast": (0, 8)}
    assert found["left_out"] == ["slow"]


def test_the_example_becomes_a_cluster_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    write = ("--stages", "3", "--write", str(file))
    found = answer(capsys, str(EXAMPLE), *TARGET, *write)
    config = parse(file.read_text().replace("insecure = false", "insecure = true"))
    assert layout(config, 8) == tuple(tuple(stage["layers"]) for stage in found["stages"])
    assert config.at(0).host == "192.168.1.10"


CLUSTER = f"""# home
[cluster]
stages = 3
[target]
path = "{TOY}"
[[node]]
rank = 0
host = "127.0.0.1"
port = 7700
[[node]]
rank = 1  # the board
host = "127.0.0.1"
port = 7701
layers = "auto"
gb_per_second = 1
[[node]]
rank = 2
host = "localhost"
port = 7702
layers = "auto"
gb_per_second = 4
[[node]]
rank = 3
host = "127.0.0.1"
port = 7703
layers = "auto"
gb_per_second = 3
"""


def test_a_cluster_file_places_itself_and_can_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = with_layers(parse(CLUSTER))
    assert layout(config, 8) == ((0, 1), (1, 5), (5, 8))
    assert with_layers(config) is config
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    found = answer(capsys, str(file), "--write", str(file))
    text = file.read_text()
    assert text.startswith("# home")
    assert "# the board" in text
    written = load(file)
    assert [list(span) for span in layout(written, 8)] == [s["layers"] for s in found["stages"]]
    # One that is left out goes, and the others move up.
    answer(capsys, str(file), "--stages", "2", "--write", str(file))
    assert load(file).stages == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "on which devices?"),
        ((*machine("a"), str(EXAMPLE)), "DEVICES and --machine both say what to plan for"),
        (machine("a", "speed=3"), "unknown field speed; give for example"),
        (machine("a", "mbit=1"), "machine a: give gb_per_second or layer_ms"),
        ((*machine("a"), *machine("a")), "two machines are called a"),
        ((*machine("a"), "--stages", "2"), "2 stages need as many devices and layers"),
        ((*machine("a"), "--context", "999999999"), "the target does not fit: weights and cache"),
        ((*machine("a"), "--write", "/nowhere/x.toml"), "/nowhere/x.toml does not exist, and to"),
        ((*machine("a"), "--policy", "flo"), "flo"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    assert says in complaint(capsys, *TARGET, *argv)


def test_automatic_layers_are_all_or_none() -> None:
    with pytest.raises(UserError, match="give it to all"):
        parse(CLUSTER.replace('layers = "auto"', "layers = [0, 4]", 1))


def status(rank: int, layers: tuple[int, int], seconds: float, **more: Any) -> Status:
    role: Role = "verify" if rank else "draft"
    ranks = tuple(Rank(peer) for peer in (0, 1, 2) if peer != rank)
    fields = {"host": f"box{rank}", "free_bytes": 2**30, "round_trips": (0.02,) * 2}
    if rank:
        fields |= {"pass_rows": (1.0, 16.0), "pass_seconds": (seconds, seconds)}
    numbers = (1.0, 0.0, 2**20, 0, 0, 0, ranks)
    return Status(0, Rank(rank), role, layers, *numbers, sent=(0, 0), **fields | more)


def test_running_nodes_say_what_they_are() -> None:
    target = target_cost(TOY, StageOptions(), 64)
    nodes = [status(0, (0, 0), 0.0), status(1, (0, 4), 0.04), status(2, (4, 8), 0.08)]
    found = from_statuses(nodes, target)
    one, other = found.devices
    assert one.speed == pytest.approx(2 * other.speed)
    assert one.memory == 2**30 + 2**20
    latency = pytest.approx(0.01 + HANDLING_SECONDS)
    assert found.network.between(one, other).latency == latency
    assert found.network.between(found.network.draft, other).latency == latency
    with pytest.raises(ClusterError, match="stage 2 reports no pass times"):
        from_statuses([*nodes[:2], status(2, (4, 8), 0.1, pass_rows=(), pass_seconds=())], target)
    with pytest.raises(ClusterError, match="no stage is linked"):
        from_statuses(nodes[:1], target)
    with pytest.raises(UserError, match="name the same model"):
        from_statuses(nodes[:2], target)
