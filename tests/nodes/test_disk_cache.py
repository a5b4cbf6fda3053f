"""Prompts and answers outlive every process: the stages have them on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.kept_states import kept_state
from asyncspec.core.kv_slots import BLOCK
from asyncspec.core.machine import Request
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.toy.model import ToyModel
from asyncspec_nodes.plugins.viewer.replay import replay
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.limits import PREFIX_UNIT
from asyncspec_protocol.messages import FINAL
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples, slow
from laws import SMALL, Shaken, watch_invariants

LONG = tuple(i % 7 for i in range(90))


def served(cluster: Cluster, *requests: Request) -> list[dict[str, float]]:
    """All at once; texts are checked against the sequential reference."""
    for request in requests:
        cluster.submit(request)
    cluster.world.run(until=1e9)
    for request in requests:
        assert tuple(cluster.world.tokens[request.request]) == cluster.expected(request)
    return [cluster.world.finished[request.request].stats for request in requests]


def test_a_prompt_is_read_once_though_every_process_is_killed(tmp_path: Path) -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, disks=tmp_path)
    (first,) = served(cluster, ask(0, prompt=LONG, max_new_tokens=10))
    cluster.restart_all()
    (second,) = served(cluster, ask(1, prompt=(*LONG, *cluster.world.tokens[0], 1, 2)))
    assert first["shared_tokens"] == 0
    assert second["shared_tokens"] == 99 // PREFIX_UNIT * PREFIX_UNIT
    # Another text has nothing of it, and neither has what begins otherwise.
    cluster.restart_all()
    (third,) = served(cluster, ask(2, prompt=(3, *LONG)))
    assert third["shared_tokens"] == 0


@pytest.mark.parametrize("features", [(), (1, 3)])
def test_a_kill_in_the_middle_of_an_answer_loses_no_prompt(
    tmp_path: Path, features: tuple[int, ...]
) -> None:
    cluster = Cluster(UnitCosts(), min_common_prefix=8, disks=tmp_path, features=features)
    cluster.submit(ask(0, prompt=LONG, max_new_tokens=10**6))
    cluster.world.at(200.0, cluster.restart_all)
    cluster.world.run(until=1e9)
    assert cluster.world.tokens[0]
    assert not cluster.world.finished
    (stats,) = served(cluster, ask(1, prompt=LONG))
    assert stats["shared_tokens"] == kept_state(len(LONG), 0)


chats = st.lists(
    st.tuples(
        # New tokens of the user, the answer's limit, and whether every process is killed before.
        st.lists(st.integers(0, 6), min_size=1, max_size=20),
        st.integers(1, 30),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=examples(100, quick=20))
@given(
    chats,
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 3),
    st.lists(st.integers(0, 6)),
    st.sampled_from((Sampling(), Sampling(temperature=0.8, seed=5))),
    st.sampled_from(((), (), (FINAL,), (1, 3))),
    st.booleans(),
)
def test_a_chat_goes_on_after_restarts_with_the_same_text(
    turns: list[tuple[list[int], int, bool]],
    policy: str,
    stages: int,
    delays: list[int],
    sampling: Sampling,
    features: tuple[int, ...],
    apart: bool,
) -> None:
    """Whatever comes when, the text is that of the sequential decoder, and no more is read than
    what is new and the rest of a unit."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Shaken([1, *delays]),
            stages=stages,
            min_common_prefix=8,
            policies=SMALL,
            features=features,
            apart=apart,
            disks=Path(folder),
        )
        watch_invariants(cluster)
        held, prompt = 0, LONG
        for number, (user, limit, killed) in enumerate(turns):
            if killed:
                cluster.restart_all()
                held = held // PREFIX_UNIT * PREFIX_UNIT
            prompt += tuple(user)
            request = ask(
                number, prompt=prompt, max_new_tokens=limit, policy=policy, sampling=sampling
            )
            (stats,) = served(cluster, request)
            assert stats["shared_tokens"] >= held
            answer = tuple(cluster.world.tokens[number])
            # Of an answer's features some alone may be kept.
            held = len(prompt if features else prompt + answer) - 1
            prompt += answer


@pytest.mark.parametrize("features", [(), slow((1, 3))])
def test_a_chat_of_ten_turns_with_a_kill_before_each_reads_what_is_new(
    tmp_path: Path, features: tuple[int, ...]
) -> None:
    """All ten turns over 8,000 tokens read at most 1.1 times the new tokens."""
    cluster = Cluster(
        UnitCosts(),
        stages=2,
        model=ToyModel(attention="parent"),
        min_common_prefix=64,
        min_disk_prefix=256,
        prefill_rows=64,
        features=features,
        disks=tmp_path,
    )
    policy = "flowspec" if features else "autoregressive"
    prompt = tuple((i * i) % 7 for i in range(8000))
    read = new = 0
    for number in range(10):
        request = ask(number, prompt=prompt, max_new_tokens=40, policy=policy)
        (stats,) = served(cluster, request)
        read += len(prompt) - int(stats["shared_tokens"])
        new += 20 if number else 8000
        prompt += (*cluster.world.tokens[number], *(1, 2, 3, number % 7) * 5)
        cluster.restart_all()
    assert read <= 1.1 * new


@pytest.mark.parametrize("apart", [False, True])
def test_features_outlive_every_process(tmp_path: Path, apart: bool) -> None:
    """An EAGLE head is fed what it would have been fed, which ``ToyEagle`` checks; where they are
    lost the prompt is read again."""
    cluster = Cluster(
        UnitCosts(), min_common_prefix=8, disks=tmp_path, features=(1, 3), apart=apart
    )
    served(cluster, ask(0, prompt=LONG, max_new_tokens=60))
    cluster.restart_all()
    prompt = (*LONG, *cluster.world.tokens[0], 1, 2)
    (stats,) = served(cluster, ask(1, prompt=prompt))
    assert stats["shared_tokens"] >= len(LONG)
    cluster.restart_all()
    for file in (tmp_path / "features0").iterdir():
        file.unlink()
    (stats,) = served(cluster, ask(2, prompt=prompt))
    assert stats["shared_tokens"] == 0


def test_features_of_other_depths_are_not_fed(tmp_path: Path) -> None:
    served(
        Cluster(UnitCosts(), min_common_prefix=8, disks=tmp_path, features=(1, 3)),
        ask(0, prompt=LONG),
    )
    other = Cluster(UnitCosts(), min_common_prefix=8, disks=tmp_path, features=(2, 3))
    (stats,) = served(other, ask(1, prompt=LONG))
    assert stats["shared_tokens"] == 0


def test_requests_that_come_together_wait_for_one_reading(tmp_path: Path) -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, disks=tmp_path)
    served(cluster, ask(0, prompt=LONG))
    cluster.restart_all()
    stats = served(cluster, *(ask(i, prompt=(*LONG, i)) for i in (1, 2, 3)))
    # A part ends some tokens before the prompt's own end, where templates render it otherwise.
    assert all(one["shared_tokens"] >= BLOCK for one in stats)
    files = cluster.world.actors[Rank(1)].prefixes
    assert files.hits == 1


def test_a_tenants_prompt_is_not_stored(tmp_path: Path) -> None:
    """What is stored is not encrypted."""
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, disks=tmp_path)
    served(cluster, ask(0, prompt=LONG, tenant="one"))
    assert not list(tmp_path.rglob("*.kv"))
    served(cluster, ask(1, prompt=LONG))
    cluster.restart_all()
    (stats,) = served(cluster, ask(2, prompt=LONG, tenant="one"))
    assert stats["shared_tokens"] == 0


@pytest.mark.parametrize("lost", [1, 2])
def test_what_one_stage_has_lost_is_read_again(tmp_path: Path, lost: int) -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, disks=tmp_path)
    served(cluster, ask(0, prompt=LONG))
    cluster.restart_all()
    for file in (tmp_path / f"stage{lost}of2").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    (stats,) = served(cluster, ask(1, prompt=(*LONG, 1)))
    assert stats["shared_tokens"] == 0


def test_without_room_for_both_a_prompt_is_computed_again(tmp_path: Path) -> None:
    cluster = Cluster(UnitCosts(), stages=2, min_common_prefix=8, disks=tmp_path, slots=256)
    served(cluster, ask(0, prompt=LONG, policy="autoregressive"))
    cluster.restart_all()
    cluster.slots = 128
    cluster.restart_all()
    (stats,) = served(cluster, ask(1, prompt=(*LONG, 1), policy="autoregressive"))
    assert stats["shared_tokens"] == 0


@pytest.mark.parametrize("features", [(), (1, 3)])
def test_a_recording_with_a_disk_cache_is_replayed(
    tmp_path: Path, features: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {
        "stages": 2,
        "min_common_prefix": 8,
        "disks": tmp_path,
        "features": features,
    }
    cluster = Cluster(UnitCosts(), **options)
    served(cluster, ask(0, prompt=LONG))
    cluster = Cluster(UnitCosts(), **options, record=True)
    (stats,) = served(cluster, ask(1, prompt=(*LONG, 1)))
    assert stats["shared_tokens"]
    results = replay(cluster.trace().lines)
    assert [one.difference for one in results] == [None] * 3
