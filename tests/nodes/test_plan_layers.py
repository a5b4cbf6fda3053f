"""``asyncspec plan layers`` as a user types it, ``layers = "auto"``, and running nodes' reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import commands
from asyncspec.backend.base import StageOptions
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.placement.model import HANDLING_SECONDS
from asyncspec.plugins.hf.kernels import device as torch_device
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import TargetTable, layout
from asyncspec_nodes.cluster.file import load, parse
from asyncspec_nodes.cluster.placement import cluster_cost, target_cost, with_layers
from asyncspec_nodes.plugins.simulation.device_sources import from_statuses
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


def written(found: dict[str, Any]) -> str:
    """The devices with their layers, as the two lines for readers have them."""
    return ", ".join(f"{name} {first}-{end - 1}" for name, (first, end) in spans(found).items())


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
    several, alone = text.splitlines()[-2:]
    assert several.startswith("best where 16 ask at a time: slow 0-1, fast 2-7; one alone gets ")
    assert alone.startswith("best where one asks (--best-for answer): ")
    rates = [float(line.rpartition(" gets ")[2].split()[0]) for line in (several, alone)]
    assert rates[0] <= rates[1]
    # The object has both, too.
    found = answer(capsys, *TARGET, *two, "--policy", "flow")
    one_user = found["one_user"]
    assert found["sessions"] == 16
    assert (found["left_out"], one_user["left_out"]) == ([], ["slow"])
    assert f": {written(one_user)}; it gets " in alone
    assert f": {written(found)}; one alone gets " in several
    assert [round(part["tokens_per_second"]["flow"], 1) for part in (found, one_user)] == rates
    for asked in (("--best-for", "answer"), ("--sessions", "1")):
        assert answer(capsys, *TARGET, *two, "--policy", "flow", *asked)["one_user"] is None
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


@pytest.mark.slow
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


WITH_PACES = """
[pace.1]
seconds = 0.1
[pace.2]
seconds = 0.2  # the slow one
[pace.3]
seconds = 0.3
[pace.0]
level_seconds = 0.4
[source]
host = "127.0.0.1"
port = 7709
[pace.4]
level_seconds = 0.5
"""


def test_paces_stay_with_their_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER + WITH_PACES)
    addresses = {"one": 7703, "two": 7701}
    devices = tmp_path / "devices.toml"
    devices.write_text(
        "".join(
            f'[[machine]]\nname = "{name}"\nmemory_gib = 1\nlayer_ms = 10\n'
            f'host = "127.0.0.1"\nport = {port}\n'
            for name, port in addresses.items()
        )
    )
    answer(capsys, str(devices), "--stages", "2", "--policy", "chain", "--write", str(file))
    written = load(file)
    ports = {node.port: node.rank for node in written.node}
    assert {ports[7701], ports[7703]} == {1, 2}
    assert written.pace[ports[7701]].seconds == 0.1
    assert written.pace[ports[7703]].seconds == 0.3
    assert written.pace[0].level_seconds == 0.4
    assert written.pace[3].level_seconds == 0.5
    assert len(written.pace) == 4


PLAIN_CLUSTER = f"""
[target]
path = "{BUNDLED_TARGET}"
quantize = "int4"
dtype = "float32"
[limits]
sessions = 3
[[node]]
rank = 1
host = "127.0.0.1"
port = 7701
[[node]]
rank = 2
host = "127.0.0.1"
port = 7702
"""


def test_a_cluster_files_target_is_planned_as_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(PLAIN_CLUSTER)
    devices = (*machine("a"), "--target", str(BUNDLED_TARGET), "--policy", "autoregressive")
    fixed = ("--policy", "autoregressive")

    def held(*argv: str) -> int:
        return sum(stage["weights_bytes"] for stage in answer(capsys, *argv)["stages"])

    assert held(str(file), *fixed) == held(*devices, "--quantize", "int4", "--dtype", "float32")
    assert held(str(file), *fixed, "--quantize", "none") == held(*devices, "--dtype", "float32")
    # So is that of the file that is written into; what contradicts it is refused.
    assert held(*machine("a"), *machine("b"), "--write", str(file), *fixed) == held(str(file))
    says = complaint(capsys, str(file), "--quantize", "none", "--write", str(file))
    assert "[target] quantize is int4, and the plan is for none" in says
    for option, value, what in (
        ("--device", "cuda", "[target] device is auto, and the plan is for cuda"),
        ("--sessions", "4", "[limits] sessions is 3, and the plan is for 4"),
    ):
        assert what in complaint(capsys, str(file), option, value, "--write", str(file))


@pytest.mark.parametrize("sessions", ["1", "16"])
def test_every_session_has_a_tree(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("--target", str(BUNDLED_TARGET), "--context", "64", "--sessions", sessions)
    found = answer(capsys, *target, "--stages", "1", *machine("a"))
    assert found["context"] == 64
    (stage,) = found["stages"]
    (same,) = commands.json_output(
        capsys, "memory", *target, "--stages", "1", "--policy", "flow", "--json"
    )["stages"]
    assert stage["cache_bytes"] == same["cache_bytes"] + same["tree_bytes"]
    config = parse(f"{CLUSTER.replace(TOY, str(BUNDLED_TARGET))}[limits]\nsessions = {sessions}\n")
    slots = cluster_cost(config, "flow", stages=1, context=64).slots
    assert slots * same["bytes_per_token"] == stage["cache_bytes"]


def test_automatic_layers_leave_memory_for_trees() -> None:
    text = CLUSTER.replace(TOY, str(BUNDLED_TARGET))
    without = parse(text + '[draft]\npolicy = "autoregressive"\n')
    least = cluster_cost(without, "autoregressive").memory((1, 2))
    limit = f"gb_per_second = 4\nmemory_gib = {(least + 2**20) / 2**30}"
    short = text.replace("gb_per_second = 4", limit)
    assert with_layers(parse(short + '[draft]\npolicy = "autoregressive"\n')).at(2).layers
    with pytest.raises(UserError, match="rank 2 is too small"):
        with_layers(parse(short))


def test_stages_may_name_devices_of_their_own() -> None:
    text = CLUSTER.replace(TOY, str(BUNDLED_TARGET)).replace(
        "path = ", 'dtype = "float32"\nmode = "fast"\nquantize = "int4"\ndevice = "cpu"\npath = '
    )
    mixed = text.replace("rank = 2", 'rank = 2\ndevice = "emulated"')
    there = text.replace('"cpu"', '"emulated"')
    here, both, other = (cluster_cost(parse(one), "flow") for one in (text, mixed, there))
    for layer in range(len(here.layers)):
        span = (layer, layer + 1)
        assert both.weights(span) == max(here.weights(span), other.weights(span))
    assert here.weights((1, 2)) < other.weights((1, 2))


def test_unstated_speeds_and_memory_are_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(PLAIN_CLUSTER)
    found = answer(capsys, str(file), "--stages", "2")
    assert found["tokens_per_second"] == {"plain": None, "flow": None}
    for stage in found["stages"]:
        assert stage["pass_ms"] is None
        assert stage["device_bytes"] is None
    assert cli.main(["plan", "layers", str(file)]) == 0
    text = capsys.readouterr().out
    assert "no speed is predicted" in text
    assert "pass ms" not in text


def test_speeds_are_predicted_where_all_stages_state_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(PLAIN_CLUSTER.replace("port = 7701", "port = 7701\ngb_per_second = 1"))
    assert cli.main(["plan", "layers", str(file)]) == 0
    assert "no speed is predicted: rank 2 has no gb_per_second" in capsys.readouterr().out
    # Seconds of a draft would be compared with invented ones.
    says = complaint(capsys, str(file), "--draft-seconds", "0.01")
    assert "rank 2 has no gb_per_second; give it to every stage" in says
    file.write_text(PLAIN_CLUSTER)
    says = complaint(capsys, str(file), "--draft-seconds", "0.01", "--best-for", "answer")
    assert "rank 1, rank 2 have no gb_per_second" in says


def test_a_new_file_has_the_planned_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_path / "devices.toml"
    devices.write_text(
        '[draft]\nhost = "127.0.0.1"\n[[machine]]\nname = "a"\nhost = "127.0.0.1"\n'
        "memory_gib = 4\ngb_per_second = 1\n"
    )
    monkeypatch.chdir(BUNDLED_TARGET.parent)
    file = tmp_path / "new.toml"
    options = ("--dtype", "float32", "--quantize", "int8", "--mode", "fast", "--device", "cpu")
    target = ("--target", BUNDLED_TARGET.name, "--sessions", "5")
    answer(capsys, str(devices), *target, *options, "--write", str(file))
    written = load(file)
    wanted = TargetTable(str(BUNDLED_TARGET), "float32", "fast", "int8", "cpu")
    assert written.target == wanted
    assert written.limits.sessions == 5


def test_states_of_sessions_take_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT))
    one = target_cost(str(tmp_path), StageOptions(), 64)
    many = target_cost(str(tmp_path), StageOptions(), 64, sessions=16)
    # A matrix of 64 by 64 numbers for each of 4 heads, at least.
    assert many.cache((0, 1)) - one.cache((0, 1)) >= 15 * 4 * 64 * 64 * 2
    assert many.cache((3, 4)) == one.cache((3, 4))
    argv = ("--target", str(tmp_path), *TARGET[2:], *machine("a"))
    sessions = [answer(capsys, *argv, "--sessions", number) for number in ("1", "16")]
    least, most = (found["stages"][0]["memory_bytes"] for found in sessions)
    assert most - least == many.memory((0, 4)) - one.memory((0, 4))


RECURRENT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "num_experts": 0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
}


def test_the_machine_that_is_short_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--machine", "small:memory_gib=0.01,layer_ms=10")
    argv = ("--stages", "2", *machine("large"), *small)
    assert "small is too small for any stage" in complaint(capsys, *argv)
    short = CLUSTER.replace("gb_per_second = 4", "memory_gib = 0.00000001")
    with pytest.raises(UserError, match=r"rank 2 is too small.* it has 0.00 GiB; add a \[\[node"):
        with_layers(parse(short))


@pytest.mark.slow
def test_a_row_keeps_links_busy(capsys: pytest.CaptureFixture[str]) -> None:
    def speed(mbit: str) -> dict[str, float]:
        two = (f"layer_ms=10,mbit={mbit}", f"layer_ms=10,mbit={mbit}")
        machines = (*machine("a", two[0]), *machine("b", two[1]))
        target = ("--target", str(BUNDLED_TARGET), "--stages", "2", "--context", "64")
        found: dict[str, float] = answer(capsys, *target, *machines)["tokens_per_second"]
        return found

    wide, narrow = speed("1000"), speed("0.5")
    # A pass of many rows takes many times as long to send as one of a single row.
    assert narrow["flow"] / wide["flow"] < 0.8 * narrow["plain"] / wide["plain"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "on which devices?"),
        (machine("a", "mbit=inf"), "Expected float < 1000000000.0"),
        (("--machine", "a:memory_gib=inf,layer_ms=1"), "Expected float < 1000000000.0"),
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


def test_automatic_layers_do_not_depend_on_this_machines_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node finds them for itself."""

    def asked() -> list[str]:
        raise AssertionError("the devices of this machine were asked for")

    monkeypatch.setattr(torch_device, "names", asked)
    draft = '[[node]]\nrank = 0\nhost = "127.0.0.1"\nport = 7700\n'
    text = re.sub(r"(port = 770[12])", r'\1\nlayers = "auto"', PLAIN_CLUSTER + draft)
    one = with_layers(parse(text))
    other = with_layers(parse(text.replace("port = 7701", 'port = 7701\ndevice = "auto"')))
    assert [node.layers for node in one.node] == [node.layers for node in other.node]
    assert one.at(1).layers != "auto"
