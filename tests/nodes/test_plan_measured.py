"""What ``asyncspec plan --connect`` makes of a first stage's answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import commands
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.plugins.dipsd.model import User
from asyncspec.plugins.dipsd.online.request import measured_deployment
from asyncspec_nodes.plugins.dipsd import running_cluster
from asyncspec_nodes.plugins.dipsd.deployment_file import parse, save, to_toml
from asyncspec_nodes.plugins.dipsd.running_cluster import measured, names
from asyncspec_protocol.ids import SessionId, draft_rank, first_session
from asyncspec_protocol.messages import PlanStatus

FIRST, LATER = SessionId(3), SessionId(first_session(draft_rank(2)) + 9)
TOLD = PlanStatus(
    *(0, "", (FIRST, LATER), (20, 12), (0.75, 0.5), (0.8, 0.6), (0.85, 0.7)),
    *((0.01, 0.02), (0.0, 0.003), (0.001, 0.001), (0.1, 0.0), (0.0, 0.4)),
    *((0.06, 0.03), (0.003, 0.002), (0.05, 0.0), 1, 0, "plan", 4, (1, 2), (5, 3)),
    *(0.25, 76.5, 57.25, 74.0, 12.5, 1.25, 300.0, 0.875, 40.0),
)
ms = st.floats(1e-3, 1e6)
names_of_users = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8)
people = st.lists(
    st.builds(User, names_of_users, st.floats(0, 1), st.just(0), ms, ms),
    min_size=1,
    max_size=5,
    unique_by=lambda user: user.name,
)


@given(
    people,
    st.lists(st.tuples(ms, st.floats(0, 1e6)), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_what_is_saved_is_what_is_read(
    users: list[User], stages: list[tuple[float, float]], rows: int
) -> None:
    users = [replace(user, name=f"u{i}{user.name}") for i, user in enumerate(users)]
    deployment = measured_deployment(users, stages, rows)
    found = parse(to_toml(deployment))
    assert found.users == deployment.users
    assert found.batch_rows == rows
    assert (found.longest, found.verifier.shape) == (deployment.longest, deployment.verifier.shape)
    for a, b in zip(found.verifier.stages, deployment.verifier.stages, strict=True):
        assert replace(a, ms_per_flop=b.ms_per_flop) == b
        assert a.ms_per_flop == pytest.approx(b.ms_per_flop)


def test_users_are_planned_for_with_caution_and_forecast_as_they_are() -> None:
    found = measured(TOLD)
    first, later = found.deployment.users
    assert first == User("draft-0", 0.75, 0, 10.0, 1.0)
    assert later.name == "draft-2"
    assert later.link_ms == pytest.approx(4.0)
    assert found.noise.alphas == (0.8, 0.6)
    assert found.noise.deviations is not None
    assert found.noise.deviations.passes == (0.05, 0.0)
    # Of 4 ms beside the tokens one is the link's.
    assert found.noise.deviations.links == pytest.approx((0.0, 0.1))


@pytest.mark.parametrize("rows", [0, 256])
def test_plans_are_for_passes_of_as_many_rows_as_there(rows: int) -> None:
    assert measured(replace(TOLD, batch_rows=rows)).deployment.batch_rows == rows


def test_users_of_one_draft_node_are_distinguished() -> None:
    assert names([FIRST, SessionId(4), LATER]) == ["draft-0.1", "draft-0.2", "draft-2"]


@pytest.mark.parametrize(
    ("reported", "says"),
    [
        (PlanStatus(0), "no request uses the policy dip-sd there now"),
        (PlanStatus(0, unknown=3), "too little is known yet of 3 answers"),
        (replace(TOLD, pass_seconds=(), row_seconds=(), pass_jitters=()), "too little is known"),
    ],
)
def test_where_there_is_nothing_to_plan(reported: PlanStatus, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        measured(reported)


@pytest.mark.parametrize("used", ["plan", "greedy", "dropped", "look", "", "something new"])
def test_it_says_what_is_in_use_and_its_throughput(used: str) -> None:
    found = measured(replace(TOLD, used=used))
    text = "\n".join((*running_cluster.measured_lines(found), *running_cluster.use_lines(found)))
    assert "draft-0  0.80 (0.75 to 0.85, 20 rounds)" in text
    assert f"there now: {running_cluster.why(found.status)}" in text
    if used:
        assert "batch 2; user:draft length draft-2:3" in text
        assert "measured: 74.0 tokens/s" in text
    reported = running_cluster.as_dict(found)
    names_in_json = {"dropped": "plan_paused", "look": "greedy_probe"}
    assert reported["used"] == names_in_json.get(used, used)
    assert reported["batches"] == [["draft-0"], ["draft-2"]]
    assert reported["lengths"] == {"draft-0": 5, "draft-2": 3}
    assert reported["forecast"] == {"plan": 76.5, "greedy": 57.25}
    assert reported["measured_users"][1]["alpha"] == [0.5, 0.6, 0.7]
    assert len(reported["measured_stages"]) == 2


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        save(tmp_path / "no" / "where.toml", measured(TOLD).deployment)


ROWS = "[verifier]\n[[stage]]\nfixed_ms = 9.0\nrow_ms = 1.0\n"
USER = "[[user]]\nalpha = 0.7\ntoken_ms = 5.0\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ROWS.replace("[verifier]", "[verifier]\nlayers = 4") + USER, "row_ms says what layers"),
        (ROWS + "[[stage]]\nfixed_ms = 1.0\n" + USER, "give row_ms, as for the other stages"),
        (ROWS + "tflops = 1.0\n" + USER, "row_ms takes no layers, tflops and memory_gb"),
        (ROWS.replace("row_ms = 1.0\n", "") + USER, "missing key: verifier.layers"),
    ],
)
def test_a_wrong_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(text)
    assert says in commands.usage_error(capsys, "plan", "dipsd", str(file))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a.toml", "--connect", "h:1"], "CONFIG and --connect both say"),
        (["--preset", "paper", "--connect", "h:1"], "--preset and --connect both say"),
        (["--connect", "h:1", "--users", "3"], "--users goes with --preset; the cluster says"),
        (["--connect", "nowhere"], "--connect"),
        (["--preset", "paper", "--save", "x.toml"], "--save goes with --connect"),
    ],
)
def test_a_wrong_argument(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in commands.usage_error(capsys, "plan", "dipsd", *argv)
