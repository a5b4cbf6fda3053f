"""A bed as data: commands, addresses, routes and cluster files."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.cluster.file import parse
from asyncspec_nodes.local.cluster import local_config
from tools.testbed import description, plan
from tools.testbed.cluster_file import check_fit, cluster_file
from tools.testbed.plan import HOST, SWITCH, Names
from tools.testbed.routes import Address, orders
from tools.testbed.tables import MAX_DEVICES, Description, DeviceTable, LinkTable, NetworkTable
from tools.testbed.wires import Line, Way

names = st.builds(
    Names, st.just("asb123456"), st.integers(2, MAX_DEVICES), st.integers(0, plan.SLOTS - 1)
)
rates = st.none() | st.floats(0.1, 10_000)


@given(names, st.data())
def test_down_removes_all_that_up_makes(bed: Names, data: st.DataObject) -> None:
    lines = [Line(data.draw(rates), data.draw(rates)) for _ in range(bed.devices)]
    up, down = plan.up(bed, lines), plan.down(bed)
    made = {command[3] for command in up if command[:3] == ("ip", "netns", "add")}
    assert made == {command[3] for command in down if command[:3] == ("ip", "netns", "del")}
    # Outside the namespaces there is one thing, and its name says whose it is.
    outside = [c for c in up if c[0] == "ip" and c[1] not in ("-n", "netns")]
    assert {bed.host} == {c[c.index("dev") + 1] if "dev" in c else c[3] for c in outside}
    assert ("ip", "link", "del", bed.host) in down
    assert len(bed.host) <= 15
    for command in up:
        if "-n" in command:
            assert command[2] in made
    shaped = [command for command in up if command[0] == "tc"]
    assert len(shaped) == sum(rate is not None for line in lines for rate in (line.up, line.down))


@given(names)
def test_no_two_have_an_address(bed: Names) -> None:
    everyone = [*range(bed.devices), HOST, SWITCH]
    assert len({bed.address(number) for number in everyone}) == len(everyone)
    assert all(bed.address(n).startswith(f"198.18.{bed.slot}.") for n in everyone)


@given(st.floats(0.1, 10_000), st.floats(0.1, 10_000))
def test_a_bucket_holds_two_frames_and_grows_with_the_rate(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 2 * 1538 <= plan.burst(low) <= plan.burst(high)
    assert high < 500 or plan.burst(high) > 65_536
    assert high > 1000 or plan.burst(high) < 2 * 65_536


def gate(way: Way) -> Address:
    return "proxy", 1000 + 20 * way[0] + way[1]


def nodes(bed: Description) -> list[Address]:
    return [(f"device-{n}", 7700) for n in range(len(bed.device))]


BED = Description(
    device=(DeviceTable(mbit=5), DeviceTable(), DeviceTable(down_mbit=7)),
    link=(
        LinkTable(between=(0, 1), one_way=True, latency_ms=3, jitter_ms=2),
        LinkTable(between=(1, 2), mbit=4),
    ),
)


def test_only_ways_that_need_it_lead_through_the_proxy() -> None:
    todo, reach = orders(BED, nodes(BED), gate, shape_lines=False)
    assert reach[0, 2] == ("device-2", 7700)
    assert reach[2, 0] == ("device-0", 7700)
    assert {route.listen for route in todo.routes} == {
        gate(w) for w in [(0, 1), (1, 0), (1, 2), (2, 1)]
    }
    there = next(route for route in todo.routes if route.listen == gate((0, 1)))
    back = next(route for route in todo.routes if route.listen == gate((1, 0)))
    assert there.connect == ("device-1", 7700)
    assert (there.forward.latency_seconds, there.forward.jitter_seconds) == (0.003, 0.002)
    # What comes back on a connection goes the other way, whoever has dialled.
    assert there.backward.latency_seconds == 0
    assert (back.forward, back.backward) == (there.backward, there.forward)
    assert todo.serials == {"wire 1-2": 4, "wire 2-1": 4}


def test_on_loopback_the_proxy_has_the_lines_too() -> None:
    todo, reach = orders(BED, nodes(BED), gate, shape_lines=True)
    assert all(address == gate(way) for way, address in reach.items())
    assert todo.serials == {
        "up 0": 5, "down 0": 5, "down 2": 7, "wire 1-2": 4, "wire 2-1": 4,
    }  # fmt: skip
    route = next(route for route in todo.routes if route.listen == gate((0, 2)))
    assert set(route.forward.serials) == {"up 0", "down 2"}
    assert set(route.backward.serials) == {"down 0"}


@pytest.mark.parametrize("shape_lines", [False, True])
@pytest.mark.parametrize("name", description.ready_made())
def test_every_serial_that_is_passed_has_a_rate(name: str, shape_lines: bool) -> None:
    bed = description.load(name)
    todo, reach = orders(bed, nodes(bed), gate, shape_lines=shape_lines)
    passed = {s for r in todo.routes for d in (r.forward, r.backward) for s in d.serials}
    assert passed == set(todo.serials)
    assert len(reach) == len(bed.device) * (len(bed.device) - 1)


@pytest.mark.parametrize("apart", [False, True])
def test_a_cluster_file_names_the_nodes_as_one_device_sees_them(apart: bool) -> None:
    bed = Description(device=(DeviceTable(),) * 4, network=NetworkTable(latency_ms=1))
    config = local_config(
        TargetTable(path="/models/t"), DraftTable(), 2 if apart else 3, 1, separate_source=apart
    )
    seen = [("198.18.0.254", 20_000 + n) for n in range(4)]
    check_fit(bed, config)
    loaded = parse(cluster_file(config, seen, bed))
    assert [(node.host, node.port) for node in loaded.nodes] == seen
    assert loaded.cluster.name == config.cluster.name


def test_a_cluster_has_as_many_nodes_as_the_bed_devices() -> None:
    config = local_config(TargetTable(path="/models/t"), DraftTable(), 2, 1)
    with pytest.raises(UserError, match=r"the bed has 2 devices, the cluster 3 nodes \(2 stages\)"):
        check_fit(Description(device=(DeviceTable(),) * 2), config)


def test_paces_are_tables_of_the_cluster_file() -> None:
    devices = (
        DeviceTable(pace=PaceTable(level_seconds=0.005)),
        DeviceTable(pace=PaceTable(seconds=0.04, plateau=8, row_seconds=0.0005)),
    )
    config = local_config(TargetTable(path="/models/t"), DraftTable(), 1, 1)
    text = cluster_file(config, [("10.0.0.1", 1), ("10.0.0.2", 1)], Description(device=devices))
    assert tomllib.loads(text)["pace"] == {
        "0": {"level_seconds": 0.005},
        "1": {"seconds": 0.04, "plateau": 8, "row_seconds": 0.0005},
    }


def fitting(*paces: PaceTable | None, apart: bool = False, **asked: Any) -> None:
    """Check a bed of devices with these paces against a cluster of as many nodes."""
    bed = Description(device=tuple(DeviceTable(pace=pace) for pace in paces))
    stages = len(paces) - 1 - apart
    target = TargetTable(path="/models/t")
    check_fit(bed, local_config(target, DraftTable(), stages, 1, separate_source=apart, **asked))


PASS, LEVEL = PaceTable(seconds=0.04), PaceTable(level_seconds=0.005)


def test_a_device_has_the_pace_of_what_it_does() -> None:
    fitting(LEVEL, PASS, PASS)
    fitting(None, PASS, LEVEL, apart=True)
    with pytest.raises(UserError, match=r"device\[2\]\.pace: level_seconds is of what drafts"):
        fitting(None, PASS, LEVEL)
    with pytest.raises(UserError, match=r"device\[2\]\.pace: seconds is a verify stage's"):
        fitting(None, PASS, PASS, apart=True)
    with pytest.raises(UserError, match=r"device\[0\]\.pace: device 2 drafts"):
        fitting(LEVEL, PASS, LEVEL, apart=True)


def test_a_pace_is_the_beds_or_the_clusters() -> None:
    fitting(LEVEL, None, None, stage_pace=PASS)
    fitting(None, PASS, PASS, draft_pace=LEVEL)
    with pytest.raises(UserError, match=r"device\[2\]\.pace: .* leave --stage-seconds, --plateau"):
        fitting(None, None, PASS, stage_pace=PaceTable(seconds=0.01))
    with pytest.raises(UserError, match=r"device\[0\]\.pace: .* leave --draft-seconds and"):
        fitting(LEVEL, PASS, PASS, draft_pace=PaceTable(level_seconds=0.01))
