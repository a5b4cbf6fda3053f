"""Bed files: what they say of every way between two devices, and what is wrong with a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import PaceTable
from tools.testbed import description
from tools.testbed.tables import Description, DeviceTable, LinkTable, NetworkTable
from tools.testbed.wires import CHUNK, Line, lines, room, slowest, socket_buffer, wires

TWO = "[[device]]\n[[device]]\n"

rates = st.none() | st.floats(0.1, 10_000)
delays = st.none() | st.floats(0, 1000)


@st.composite
def beds(draw: st.DrawFn) -> Description:
    """Any description that obeys the rules."""
    count = draw(st.integers(2, 6))
    devices = tuple(DeviceTable(mbit=draw(rates), up_mbit=draw(rates)) for _ in range(count))
    pairs = [(i, j) for i in range(count) for j in range(i)]
    links = tuple(
        LinkTable(
            between=pair,
            one_way=draw(st.booleans()),
            mbit=draw(rates),
            latency_ms=draw(delays),
            jitter_ms=draw(delays),
        )
        for pair in draw(st.lists(st.sampled_from(pairs), unique=True))
    )
    network = NetworkTable(draw(rates), draw(st.floats(0, 100)), draw(st.floats(0, 100)))
    return Description(device=devices, network=network, link=links, seed=draw(st.integers(0, 99)))


@given(beds())
def test_every_direction_has_its_links_settings_else_the_networks(bed: Description) -> None:
    description.check(bed)
    between = wires(bed)
    count = len(bed.device)
    assert set(between) == {(i, j) for i in range(count) for j in range(count) if i != j}
    assert len({wire.seed for wire in between.values()}) == len(between)
    for way, wire in between.items():
        links = [
            link
            for link in bed.link
            if link.between == way or (link.between == way[::-1] and not link.one_way)
        ]
        assert len(links) <= 1
        link = links[0] if links else LinkTable(between=way)
        latency = bed.network.latency_ms if link.latency_ms is None else link.latency_ms
        jitter = bed.network.jitter_ms if link.jitter_ms is None else link.jitter_ms
        assert wire.latency_seconds == latency / 1000
        assert wire.jitter_seconds == jitter / 1000
        assert wire.mbit == link.mbit


@given(beds())
def test_a_full_pipe_fits_in_the_room_of_its_way(bed: Description) -> None:
    cables = lines(bed)
    for way, wire in wires(bed).items():
        rate = slowest(way, wire, cables)
        assert all(rate <= r for r in (wire.mbit, cables[way[0]].up, cables[way[1]].down) if r)
        product = rate * 1e6 / 8 * (wire.latency_seconds + wire.jitter_seconds)
        assert 16_384 <= socket_buffer(way, wire, cables) <= max(16_384, rate * 1e6 / 8 * 0.02)
        assert product + CHUNK < room(way, wire, cables) < product + 3 * CHUNK


def test_every_key_is_read() -> None:
    text = """
about = "x"
seed = 7
[network]
mbit = 10
latency_ms = 1.5
jitter_ms = 2
[[device]]
cpu = 0.5
memory_mib = 512
pace = { level_seconds = 0.005, call_seconds = 0.001 }
[[device]]
up_mbit = 3
down_mbit = 4
pace = { seconds = 0.04, plateau = 16, row_seconds = 0.0005 }
[[link]]
between = [0, 1]
one_way = true
mbit = 1
latency_ms = 9
jitter_ms = 8
"""
    assert description.parse(text) == Description(
        about="x",
        seed=7,
        network=NetworkTable(mbit=10, latency_ms=1.5, jitter_ms=2),
        device=(
            DeviceTable(
                cpu=0.5,
                memory_mib=512,
                pace=PaceTable(level_seconds=0.005, call_seconds=0.001),
            ),
            DeviceTable(
                up_mbit=3,
                down_mbit=4,
                pace=PaceTable(seconds=0.04, plateau=16, row_seconds=0.0005),
            ),
        ),
        link=(LinkTable(between=(0, 1), one_way=True, mbit=1, latency_ms=9, jitter_ms=8),),
    )


def test_a_devices_own_rate_wins_and_one_direction_wins_over_both() -> None:
    text = "[network]\nmbit = 9\n[[device]]\n[[device]]\nmbit = 5\nup_mbit = 2\n"
    assert lines(description.parse(text)) == (Line(9, 9), Line(2, 5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[device]]\n", "1 [[device]] tables; a bed has 2 to 16"),
        ("[[device]]\n" * 17, "17 [[device]] tables"),
        ("", "missing key: device"),
        (TWO + "cpus = 1\n", "unknown key: device[1].cpus"),
        (TWO + "cpu = 0\n", "device[1].cpu: "),
        (TWO + "mbit = 1\nup_mbit = 2\ndown_mbit = 3\n", "device[1]: mbit is idle"),
        (TWO + "[[link]]\nbetween = [0, 2]\n", "link[0]: there is no device 2; they are 0 to 1"),
        (TWO + "[[link]]\nbetween = [1, 1]\n", "not 1 and itself"),
        (TWO + "[[link]]\nbetween = [0, 1]\n" * 2, "link[1]: the way from 0 to 1 is given twice"),
        (TWO + "pace = { second = 1 }\n", "unknown key: device[1].pace.second"),
        ("[[device]]\npace = { seconds = 1 }\n[[device]]\n", "device[0].pace: seconds is a"),
        ("[[device]]\npace = { plateau = 9 }\n[[device]]\n", "device[0].pace: plateau is a"),
        (TWO + "pace = { level_seconds = 1 }\n", "device[1].pace: level_seconds is of"),
        (TWO + "pace = { call_seconds = 1 }\n[[device]]\n", "device[1].pace: call_seconds is of"),
        (TWO + "[[device]]\npace = { seconds = 1, call_seconds = 1 }\n", "device[2].pace: seconds"),
        ("[[device", "not valid TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        description.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_or_a_ready_made_bed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TWO + 'x = "y"\n')
    with pytest.raises(UserError, match=r"mine\.toml: unknown key: device\[1\]\.x"):
        description.load(str(file))
    with pytest.raises(UserError, match="cannot read the bed file"):
        description.load(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match=r"no bed 'lan'; give a \.toml file or one of: home-wifi, "):
        description.load("lan")


@pytest.mark.parametrize("name", description.ready_made())
def test_the_ready_made_beds_are_beds(name: str) -> None:
    bed = description.load(name)
    assert bed.about
    assert len(bed.device) >= 4


def test_the_ready_made_beds_are_what_their_names_say() -> None:
    for mbit in (1000, 500, 250, 125):
        assert lines(description.load(f"lan-{mbit}")) == (Line(mbit, mbit),) * 5
    ring = wires(description.load("wan-ring"))
    assert all(0.022 <= wire.latency_seconds <= 0.075 for wire in ring.values())
    assert all(
        wire.latency_seconds >= 0.005 for wire in wires(description.load("home-wifi")).values()
    )
