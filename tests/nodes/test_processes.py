"""Real processes on loopback: the same tokens as Hugging Face alone, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import transformers

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cli.terminal.run import cut_short
from asyncspec_nodes.client import client
from asyncspec_nodes.client.answers import Answer
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, SecurityTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import FILE, LocalCluster, LocalLauncher, local_config
from asyncspec_nodes.node.reports import LoadingReport, Report
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import MAX_INT
from backend import eagle_heads
from backend.eagle_heads import Sizes
from certificates import make_keys
from commands import json_output, reset_hangup
from effort import nightly
from nodes.background import START, Background, no_process_left
from nodes.small_target import save_small_target

pytestmark = [pytest.mark.processes, pytest.mark.torch]

PROMPTS = [
    "Once upon a time there was a little fox",
    "Tom and Lily went to the park. They saw",
    "The cat sat",
]
TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer target with the demo models' tokenizer and a short context."""
    path = tmp_path_factory.mktemp("tiny")
    return save_small_target(path, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def demo() -> Iterator[Background]:
    """The bundled models, three stages."""
    target = TargetTable(path=str(BUNDLED_TARGET))
    draft = DraftTable(source=str(BUNDLED_DRAFT))
    with no_process_left():
        background = Background(local_config(target, draft, 3, 4))
        yield background
        background.close()


@functools.cache
def load(path: Path) -> tuple[Any, Any]:
    """A checkpoint's tokenizer and model, by Hugging Face alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(str(path)), model


def generate(path: Path, prompt: str, count: int, **how: float) -> tuple[list[int], str]:
    """What Hugging Face alone makes of a prompt, greedily: new tokens and their text."""
    tokenizer, model = load(path)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=count, do_sample=False, **how)
    new = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def test_a_list_of_prompts_equals_generate(
    demo: Background, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": p, "id": f"p{i}"}) + "\n" for i, p in enumerate(PROMPTS))
    )
    argv = ["--prompts", str(file), "--json", "--concurrency", "3"]
    code, out, err = demo.ask(capsys, *argv, "--max-new-tokens", str(TOKENS))
    assert (code, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in answers] == ["p0", "p1", "p2"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, text = generate(BUNDLED_TARGET, prompt, TOKENS)
        assert answer["token_ids"] == tokens
        assert answer["text"] == text
        assert answer["stats"]["new_tokens"] == len(tokens)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_packed_rows_are_fewer_bytes_and_the_same_text(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for wire in ("plain", "packed"):
        target, draft = TargetTable(path=str(tiny), dtype="bf16"), DraftTable(source="ngram")
        config = local_config(target, draft, 2, 1)
        cluster = msgspec.structs.replace(config.cluster, wire=wire)
        background = Background(msgspec.structs.replace(config, cluster=cluster))
        try:
            asked = ("--prompt", PROMPTS[0] * 3, "--json", "--max-new-tokens", str(TOKENS))
            code, out, err = background.ask(capsys, *asked, "--policy", "autoregressive")
        finally:
            background.close()
        assert (code, err) == (0, "")
        answers.append(json.loads(out))
    plain, packed = answers
    assert packed["token_ids"] == plain["token_ids"]
    assert packed["text"] == plain["text"]
    assert packed["stats"]["bytes_sent"] < plain["stats"]["bytes_sent"]


def test_one_seed_gives_one_text_whatever_the_policy(
    demo: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "11", "--max-new-tokens", "20"]
    texts = []
    for policy in ("autoregressive", "chunked", "flowspec"):
        code, out, _ = demo.ask(capsys, "--prompt", PROMPTS[0], *sampled, "--policy", policy)
        assert code == 0
        texts.append(out)
    assert texts == [texts[0]] * 3
    _, other, _ = demo.ask(capsys, "--prompt", PROMPTS[0], *sampled, "--seed", "12")
    assert other != texts[0]


def test_a_stop_string_ends_an_answer_and_penalties_are_those_of_generate(
    demo: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, text = generate(BUNDLED_TARGET, PROMPTS[0], 40, repetition_penalty=1.3)
    assert tokens != generate(BUNDLED_TARGET, PROMPTS[0], 40)[0]
    # From the middle of a token to the middle of another.
    start = len(text) // 2
    stop, argv = text[start : start + 7], ["--max-new-tokens", "400", "--json"]
    argv += [
        "--prompt",
        PROMPTS[0],
        "--repetition-penalty",
        "1.3",
        "--stop",
        "never",
        "--stop",
        stop,
    ]
    code, out, _ = demo.ask(capsys, *argv)
    answer = json.loads(out)
    assert (code, answer["finish_reason"]) == (0, "stop")
    assert answer["text"] == text[: text.index(stop)]
    count = len(answer["token_ids"])
    assert answer["token_ids"] == tokens[:count]
    assert answer["stats"]["new_tokens"] == count < 40
    decode = functools.partial(load(BUNDLED_TARGET)[0].decode, skip_special_tokens=True)
    assert stop in decode(tokens[:count])
    assert stop not in decode(tokens[: count - 1])
    _, out, _ = demo.ask(capsys, *argv, "--include-stop")
    assert json.loads(out)["text"] == text[: text.index(stop) + len(stop)]


def test_turns_of_a_conversation_follow_each_other(
    demo: Background, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps({"turns": ["One day", "Then"]}))
    code, out, _ = demo.ask(capsys, "--prompts", str(file), "--json", "--max-new-tokens", "6")
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert (first["turn"], second["turn"]) == (0, 1)
    prompt = f"One day{first['text']}\n\nThen"
    assert second["token_ids"] == generate(BUNDLED_TARGET, prompt, 6)[0]


def test_a_prompt_longer_than_the_context(
    demo: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = demo.ask(capsys, "--prompt", "fox " * 3000, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("asyncspec: the prompt has ")
    assert err.count("\n") == 1
    assert err.endswith("answer included; shorten the prompt\n")


def test_another_cluster_is_not_served(
    demo: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = demo.ask(capsys, "--prompt", "a", "--cluster", "office")
    assert (code, out) == (2, "")
    assert "refuses this client: cluster 'office' meets cluster" in err
    assert "(a client: the right --cluster NAME, or none)" in err
    assert err.count("\n") == 1


def test_an_address_alone_is_enough(demo: Background, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.name.startswith("local-")  # which nobody could guess
    host, port = demo.cluster.address
    where = ["--connect", f"{host}:{port}", "--prompt", PROMPTS[0], "--json"]
    assert cli.main(["run", *where, "--max-new-tokens", str(TOKENS)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == generate(BUNDLED_TARGET, PROMPTS[0], TOKENS)[0]


def command(*argv: str) -> list[str]:
    """``asyncspec run`` as a process."""
    return [sys.executable, "-m", "asyncspec_nodes.cli.main", "run", *argv]


def test_the_command_starts_answers_checks_and_stops(tmp_path: Path) -> None:
    argv = ["--stages", "1", "--prompt", PROMPTS[1], "--max-new-tokens", "16", "--check", "--json"]
    argv += ["--threads", "2", "--log-dir", str(tmp_path)]
    done = subprocess.run(command(*argv), capture_output=True, text=True, timeout=START)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == generate(BUNDLED_TARGET, PROMPTS[1], 16)[0]
    assert answer["check"]["equal"]
    assert answer["check"]["sentence"] == "equal to the sequential decoder: 16 of 16 tokens"
    assert (answer["stages"], answer["policy"]) == (1, "flow")
    needed = "new_tokens prompt_tokens rounds decode_seconds tokens_per_second tokens_per_round"
    needed += " hit_rate wasted_rows bytes_sent turns passes"
    assert set(needed.split()) <= answer["stats"].keys()
    logs = "".join(file.read_text() for file in tmp_path.iterdir())
    assert logs.count("threads=2") == len(re.findall(r"\bready\b", logs)) == 2
    assert "Tom and Lily" not in logs


def test_the_check_knows_penalties_and_stop_strings(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--target", str(tiny), "--draft", "ngram", "--stages", "2", "--prompt", "fox", "--json"]
    argv += ["--temperature", "0.5", "--frequency-penalty", "0.4", "--presence-penalty", "0.4"]
    argv += ["--repetition-penalty", "1.2", "--stop", "a", "--stop", "e", "--check"]
    found = json_output(capsys, "run", *argv)
    assert found["finish_reason"] == "stop"
    count = len(found["token_ids"])
    assert count < 128
    assert found["check"]["tokens"] == found["check"]["same"] == count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", nightly("int4")])
def test_a_quantised_target_checks_against_its_own_reference(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--quantize", kind, "--stages", "2", "--prompt", PROMPTS[1], "--max-new-tokens", "24"]
    argv += ["--temperature", "0.7", "--seed", "3", "--check", "--json", "--log-dir", str(tmp_path)]
    found = json_output(capsys, "run", *argv)
    assert found["check"]["equal"], found["check"]
    assert f"weights={kind}" in "".join(x.read_text() for x in tmp_path.iterdir()).replace("'", "")


def test_an_answer_that_the_context_cuts_short_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = shutil.copytree(tiny, tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 24}
    (short / "config.json").write_text(json.dumps(config))
    argv = ["--target", str(short), "--draft", "none", "--stages", "1", "--prompt", PROMPTS[2]]
    argv += ["--max-new-tokens", "100", "--ignore-eos", "--json"]
    code = cli.main(["run", *argv])
    out, err = capsys.readouterr()
    found = json.loads(out)
    count = len(found["token_ids"])
    assert count + found["stats"]["prompt_tokens"] == 24
    assert (code, found["finish_reason"]) == (0, "length")
    assert err == (
        f"asyncspec: the answer ends after {count} tokens, where the target's context does, "
        "before --max-new-tokens 100\n"
    )


def test_of_several_answers_it_is_said_how_many_were_cut_short() -> None:
    submit = Submit(0, "x", 3, 0, 0.0, 0, 1.0)
    whole = Answer(submit, 0, 0, None, token_ids=(1, 2, 3), finish_reason="length")
    stopped = Answer(submit, 1, 0, None, token_ids=(1,), finish_reason="stop")
    cut = Answer(submit, 2, 0, None, token_ids=(1, 2), finish_reason="length")
    assert cut_short([whole, stopped]) is None
    assert cut_short([whole, stopped, cut, cut]) == (
        "2 of 4 answers end where the target's context does, before --max-new-tokens 3"
    )
    submit = msgspec.structs.replace(submit, max_new_tokens=MAX_INT)
    unbounded = msgspec.structs.replace(cut, submit=submit)
    assert cut_short([unbounded]) == (
        "the answer ends after 2 tokens, where the target's context does; -n N ends it earlier"
    )


def test_an_answer_goes_on_until_the_context_ends(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--target", "toy:layers=2,vocab=64,context=300", "--draft", "none", "--stages", "1"]
    argv += ["--prompt", "1 2", "--ignore-eos", "--json"]
    for most in ((), ("-n", "-1")):
        assert cli.main(["run", *argv, *most]) == 0
        out, err = capsys.readouterr()
        assert "where the target's context does; -n N ends it earlier" in err
        answer = json.loads(out)
        count = answer["stats"]["prompt_tokens"] + len(answer["token_ids"])
        assert (count, answer["finish_reason"]) == (300, "length")


def random_eagle3(directory: Path, *, broken: bool = False) -> Path:
    """An EAGLE-3 head of speculators for the bundled target; its guesses are noise."""
    sizes = Sizes(hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=1024, layers=2)
    state = eagle_heads.eagle3(sizes, reads=256, fc_norm=True)
    if broken:
        state["norm.weight"][0] = torch.nan
    return eagle_heads.save_speculators(directory, state, sizes, fc_norm=True, norm_output=True)


def test_an_eagle_head_that_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = random_eagle3(tmp_path / "head", broken=True)
    assert cli.main(["run", "--stages", "1", "--draft", f"eagle:{head}", "--prompt", "fox"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "tensor norm.weight of" in last
    assert "holds NaN or infinite numbers" in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "apart"),
    [
        ("bundled", ["--source-apart"]),
        ("eagle3", []),
        nightly("bundled", []),
        nightly("eagle3", ["--source-apart"]),
    ],
)
def test_an_eagle_head_drafts(
    tmp_path: Path, head: str, apart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = "eagle:" if head == "bundled" else f"eagle:{random_eagle3(tmp_path / head)}+ngram"
    argv = ["--stages", "2", "--draft", source, "--prompt", PROMPTS[0], "--max-new-tokens", "20"]
    argv += apart
    found = json_output(capsys, "run", *argv, "--json", "--policy", "flowspec")
    assert found["token_ids"] == generate(BUNDLED_TARGET, PROMPTS[0], 20)[0]
    assert found["stats"]["drafted_nodes"] > 0
    if head == "bundled":
        assert found["stats"]["hit_rate"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [nightly(("twin",)), ("twin:none+ngram", "--source-apart")])
def test_a_twin_drafts(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--stages", "2", "--prompt", PROMPTS[0], "--max-new-tokens", "20", "--json"]
    # The default policy may find that so slow a draft does not pay.
    argv += ["--policy", "flowspec"]
    found = json_output(capsys, "run", *argv, "--draft", *options)
    assert found["token_ids"] == generate(BUNDLED_TARGET, PROMPTS[0], 20)[0]
    assert found["stats"]["hit_rate"] > 0.7


@pytest.mark.slow
def test_a_token_source_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A draft model and n-gram lookup, asked over a link; the source's time is accounted for."""
    argv = ["--stages", "2", "--draft", "hybrid", "--source-apart", "--prompt", PROMPTS[0]]
    argv += ["--max-new-tokens", "30", "--check", "--json", "--policy", "flowspec"]
    found = json_output(capsys, "run", *argv)
    assert found["check"]["sentence"] == "equal to the sequential decoder: 30 of 30 tokens"
    assert found["stats"]["hits"] > 5
    assert found["stats"]["draft_seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [["suffix"], ["suffix+ngram", "--source-apart"]])
def test_suffix_decoding_knows_earlier_answers(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two equal requests is proposed what the first was answered."""
    (tmp_path / "prompts").write_text(2 * (json.dumps({"prompt": PROMPTS[0]}) + "\n"))
    argv = ["run", "--stages", "1", "--prompts", str(tmp_path / "prompts"), "--json", "--draft"]
    argv += [*options, "--policy", "pruned", "--max-new-tokens", "24"]
    assert cli.main(argv) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    want = generate(BUNDLED_TARGET, PROMPTS[0], 24)[0]
    assert first["token_ids"] == second["token_ids"] == want
    assert second["stats"]["hits"] > first["stats"]["hits"] + 5


def nodes_of(parent: psutil.Process) -> list[psutil.Process]:
    """The nodes a process has started, by whatever ways."""
    found = []
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if "--role" in " ".join(process.cmdline()):
                found.append(process)
    return found


def with_rank(nodes: list[psutil.Process], rank: int) -> psutil.Process:
    """The process of a rank."""
    (found,) = (n for n in nodes if f"--rank {rank} " in " ".join(n.cmdline()))
    return found


TOY = "toy:layers=4,vocab=64,context=8192"
"""For what concerns processes alone: it needs no torch."""


class Running:
    """``asyncspec run`` in the middle of a long answer."""

    def __init__(self, stages: int) -> None:
        argv = ["--target", TOY, "--draft", "none", "--stages", str(stages)]
        argv += ["--prompt", "1 2", "--max-new-tokens", "4000", "--stage-seconds", "0.02"]
        self.process = subprocess.Popen(
            command(*argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=reset_hangup,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(1), self.process.communicate()[1]
        launcher = psutil.Process(self.process.pid)
        self.nodes = nodes_of(launcher)
        assert len(self.nodes) == stages + 1
        # Whatever else it has started ends with it, too.
        self.family = launcher.children(recursive=True)
        self.listening = {
            os.stat(f"/proc/{node.pid}/fd/{one.fd}").st_ino
            for node in self.nodes
            for one in node.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }

    def ended(self) -> str:
        """Wait for the end of everything; what was said on stderr."""
        _, err = self.process.communicate(timeout=240)
        gone, alive = psutil.wait_procs(self.family, timeout=240)
        assert alive == []
        assert len(gone) == len(self.family)
        assert self.listening
        # By their sockets: somebody else may listen at the same ports by now.
        tables = [file.read_text() for file in Path("/proc/net").glob("tcp*")]
        lines = [line.split() for table in tables for line in table.splitlines()[1:]]
        assert not self.listening & {int(line[9]) for line in lines}
        return err


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "name"), [(0, "the draft node"), (2, "stage 2")])
def test_a_node_killed_in_the_middle_is_named_and_started_again(rank: int, name: str) -> None:
    running = Running(2)
    with_rank(running.nodes, rank).kill()
    assert running.process.stderr is not None
    line = running.process.stderr.readline()
    assert line == f"asyncspec: {name} was killed by SIGKILL; it is started again\n"
    # Who interrupts it now leaves nothing behind either: the new one has the old one's port.
    running.process.send_signal(signal.SIGINT)
    assert running.ended().endswith("asyncspec: interrupted\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_signal_stops_every_process(signum: signal.Signals) -> None:
    running = Running(1)
    running.process.send_signal(signum)
    assert running.ended() == "asyncspec: interrupted\n"
    assert running.process.returncode == 1


def test_an_interrupt_ends_the_answer_with_its_statistics_and_stops_every_process() -> None:
    running = Running(1)
    running.process.send_signal(signal.SIGINT)
    said = running.ended()
    assert said.endswith("asyncspec: interrupted\n")
    assert running.process.returncode == 1
    (tokens,) = (line.split()[-1] for line in said.splitlines() if line.startswith("tokens  "))
    assert int(tokens) > 0


def test_answers_to_a_list_are_printed_as_they_come(tmp_path: Path) -> None:
    """Who interrupts it has those that were done."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 2"}\n' * 40)
    argv = ["--target", TOY, "--draft", "none", "--stages", "1", "--prompts", str(file)]
    argv += ["--json", "--max-new-tokens", "60", "--stage-seconds", "0.01"]
    process = subprocess.Popen(
        command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (1, "asyncspec: interrupted\n")
    answers = [first, *map(json.loads, out.splitlines())]
    assert [answer["index"] for answer in answers] == list(range(len(answers)))
    assert len(answers) < 40


def test_an_interrupt_while_all_is_imported_stops_every_process(tiny: Path) -> None:
    argv = ["--target", str(tiny), "--draft", "none", "--stages", "1", "--prompt", "fox"]
    process = subprocess.Popen(command(*argv), stderr=subprocess.PIPE, text=True)
    launcher = psutil.Process(process.pid)
    while not (family := launcher.children(recursive=True)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (1, "asyncspec: interrupted\n")
    assert psutil.wait_procs(family, timeout=240)[1] == []


def test_nodes_and_files_do_not_outlive_a_killed_parent() -> None:
    running = Running(1)
    (folder,) = {folder_of(process) for process in running.family} - {None}
    assert folder is not None
    assert (folder / FILE).exists()
    running.process.kill()
    assert running.ended() == ""
    assert not folder.exists()


def folder_of(process: psutil.Process) -> Path | None:
    """Where the files of a cluster are, of which this may be a process."""
    return next((Path(word).parent for word in process.cmdline() if word.endswith(FILE)), None)


def start(config: Config, received: Callable[[Report, list[psutil.Process]], None]) -> None:
    """Start a cluster and stop it at once; ``heard`` also gets its processes."""
    before = nodes_of(psutil.Process())

    def nodes() -> list[psutil.Process]:
        return [node for node in nodes_of(psutil.Process()) if node not in before]

    async def inside() -> None:
        # Not forked: who loads takes a while, as torch is still to be imported.
        launch = LocalLauncher(forks=False)
        async with LocalCluster(config, lambda report: received(report, nodes()), launch=launch):
            pass

    try:
        asyncio.run(inside())
    finally:
        assert nodes() == []


@pytest.mark.slow
def test_a_node_killed_while_it_loads_is_named(tiny: Path) -> None:
    def kill(report: Report, nodes: list[psutil.Process]) -> None:
        if report == LoadingReport(2, "torch"):
            with_rank(nodes, 2).kill()

    config = local_config(TargetTable(path=str(tiny)), DraftTable("none", "autoregressive"), 2, 1)
    with pytest.raises(ClusterError, match=r"^stage 2 was killed by SIGKILL$"):
        start(config, kill)


def test_a_node_that_finds_a_mistake_passes_it_on() -> None:
    config = local_config(TargetTable(path=TOY), DraftTable("none", "flowspec"), 1, 1)
    with pytest.raises(UserError, match=r"^policy flowspec needs a token source"):
        start(config, lambda report, nodes: None)


@pytest.mark.slow
def test_a_cluster_with_keys_serves_its_members_only(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A late node completes no handshake meanwhile.
    monkeypatch.setattr(client, "PROBE_SECONDS", START)
    make_keys(tmp_path, "box")
    files = (str(tmp_path / name) for name in ("ca.pem", "box.pem", "box.key"))
    config = local_config(TargetTable(path=str(tiny)), DraftTable("none", "autoregressive"), 1, 1)
    background = Background(msgspec.structs.replace(config, security=SecurityTable(*files)))
    try:
        code, out, err = background.ask(capsys, "--prompt", "fox")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "--config" in err
        file = tmp_path / "cluster.toml"
        file.write_text(to_toml(background.cluster.config))
        argv = ["--config", str(file), "--prompt", "fox", "--json", "--max-new-tokens", "4"]
        assert cli.main(["run", *argv]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == generate(tiny, "fox", 4)[0]
    finally:
        background.close()
