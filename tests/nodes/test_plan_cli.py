"""``asyncspec plan dipsd`` as a user types it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import commands
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.plugins.dipsd.deployment_file import load

EXAMPLE = Path(__file__).resolve().parents[2] / "nodes" / "examples" / "plans" / "dipsd.toml"
SERVER = """
[verifier]
layers = 4
hidden = 64
ffn = 128
[[stage]]
layers = 4
tflops = 1.0
fixed_ms = 10.0
memory_gb = 1.0
"""
USER = "[[user]]\nalpha = 0.7\ntoken_ms = 5.0\n"


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    return commands.json_output(capsys, "plan", "dipsd", *argv, "--json")


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    return commands.usage_error(capsys, "plan", *argv)


@pytest.mark.parametrize("method", ["ours", "algorithm1"])
def test_the_papers_headlines(capsys: pytest.CaptureFixture[str], method: str) -> None:
    paper = ("--preset", "paper", "--method", method)
    found = answer(capsys, *paper, "--users", "14", "--alpha", "0.78")
    assert found["over_ad"] == pytest.approx(17.889, abs=5e-4)
    assert found["over_ad_greedy"] == pytest.approx(1.378, abs=5e-4)
    found = answer(capsys, *paper, "--users", "6", "--alpha", "0.95")
    assert found["over_ad_greedy"] == pytest.approx(1.931, abs=5e-4)
    assert found["over_one_batch"] == pytest.approx(1.047, abs=5e-4)
    assert [batch["lengths"] for batch in found["plan"]] == [[7, 7]] * 3
    assert found["proved"] == (method == "ours")
    assert sum(found["throughput_by_user"].values()) == pytest.approx(found["throughput"])


def test_a_description_of_devices_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, str(EXAMPLE), "--jitter", "0.2", "--true-alpha", "0.6")
    assert (found["users"], found["stages"]) == (4, 2)
    named = [name for batch in found["plan"] for name in batch["users"]]
    assert sorted(named) == ["desktop-1", "desktop-2", "laptop", "phone"]
    assert 0 < found["simulated"]["plan"]["throughput"] < found["throughput"]
    assert found["throughput"] <= found["bound"] * (1 + 1e-9)
    assert load(EXAMPLE).users[0].token_ms == pytest.approx(18.0 + 0.1, abs=0.02)


def test_every_user_has_a_name_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(SERVER + USER + 'name = "user2"\n' + USER + USER + "count = 2\n")
    found = answer(capsys, str(file))
    assert [*found["throughput_by_user"]] == ["user2", "user3", "user3-1", "user3-2"]
    assert len(found["throughput_by_user"]) == found["users"]


def test_the_text_says_who_limits_and_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "dipsd", str(EXAMPLE)]) == 0
    out = capsys.readouterr().out
    assert "limited by batch" in out
    assert "one cycle" in out
    assert "no plan is better (proved)" in out
    slow = ["--preset", "paper", "--token-ms", "200", "--jitter", "0.1"]
    assert cli.main(["plan", "dipsd", *slow]) == 0
    out = capsys.readouterr().out
    assert "speculation loses here" in out
    assert "simulated: this plan" in out


def test_a_seed_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--preset", "paper", "--users", "3", "--jitter", "0.3")
    first, again, other = (
        answer(capsys, *argv, "--seed", seed)["simulated"] for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fair"], "invalid choice: 'fair'"),
        (["dipsd"], "Give a CONFIG file or --preset paper"),
        (["dipsd", "a.toml", "--preset", "paper"], "leave one out"),
        (["dipsd", "/nowhere/a.toml"], "cannot read the description /nowhere/a.toml: No such file"),
        (["dipsd", "a.toml", "--users", "3"], "--users goes with --preset"),
        (["dipsd", "--preset", "paper", "--users", "0"], "--users is 0; it must be at least 1"),
        (["dipsd", "--preset", "paper", "--users", "9999"], "it must be at most 1024"),
        (["dipsd", "--preset", "paper", "--stages", "65"], "it must be at most 64"),
        (["dipsd", "--preset", "paper", "--alpha", "1.2"], "--alpha is 1.2; it must be at most 1"),
        (["dipsd", "--preset", "paper", "--token-ms", "0"], "--token-ms is 0; it must be above 0"),
        (["dipsd", "--preset", "paper", "--true-alpha", "2"], "--true-alpha is 2"),
        (["dipsd", "--preset", "paper", "--prefix", "99999"], "a prefix of 99999 positions"),
    ],
)
def test_a_wrong_argument(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in complaint(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[verifier", "not valid TOML"),
        (USER, "missing key: verifier"),
        (SERVER, "missing key: user"),
        (SERVER + "user = []", "unknown key: stage[0].user"),
        (SERVER + USER + "alfa = 1", "unknown key: user[0].alfa"),
        (SERVER + USER + "count = 0", "user[0].count: "),
        (SERVER + USER.replace("0.7", "1.5"), "user[0].alpha: "),
        (SERVER + USER.replace("0.7", "nan"), "user[0].alpha: "),
        (SERVER + USER + "tflops = 3.0", "token_ms says what tflops and fixed_ms would"),
        (SERVER + "[[user]]\nalpha = 0.5", "give token_ms, or tflops and fixed_ms"),
        (SERVER + "[[user]]\nalpha = 0.5\ntflops = 3.0", "a [draft] table"),
        (SERVER.replace("layers = 4\nt", "layers = 3\nt") + USER, "hold 3 layers in sum"),
        (SERVER + USER + "count = 1024\n" + USER, "there are 1025 users; at most 1024"),
        (SERVER.replace("1.0\n", "1e-9\n", 2) + USER, "the target's weights do not fit"),
        (SERVER + USER + "prefix = 100000000", "the users' caches hold 100000000 positions"),
        (SERVER + USER + 'name = "a"\n' + USER + 'name = "a"\n', "two users are called a; give"),
        (
            SERVER + USER + 'name = "a"\ncount = 2\n' + USER + 'name = "a-2"\n',
            "two users are called a-2; give",
        ),
        (SERVER.replace("tflops = ", "tflops = 1e-300 # ", 1) + USER, "stage[0].tflops: "),
        ("user = []\nstage = []\n" + SERVER.split("[[stage]]")[0], "there are no users"),
    ],
)
def test_a_wrong_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(text)
    assert says in complaint(capsys, "dipsd", str(file))
