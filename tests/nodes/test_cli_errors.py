"""A user's mistake: one line on stderr, exit code 2, no traceback, before anything is started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncspec.policy.registry import POLICIES, lossless
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cli.cluster_options import lone_gguf
from asyncspec_nodes.client import answers, client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_nodes.console.arguments import print_notice
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.keys import read_keys
from asyncspec_nodes.node import cli as node_cli
from asyncspec_nodes.node import listen

Change = Callable[[Path], None]


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that ``asyncspec run`` answers with."""
    return _line(capsys, cli.main, ["run", *argv])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "70000"], "--port is 70000; it must be 0 to 65535"),
        (["--port", "x"], "invalid int value: 'x'"),
        (["--max-concurrent", "0"], "--max-concurrent is 0; it must be at least 1"),
        (["--max-body-bytes", "-1"], "--max-body-bytes is -1; it must be at least 1"),
        (["--drain-seconds", "nan"], "--drain-seconds is nan; it must be above 0"),
        (["--answer-seconds", "1e300"], "--answer-seconds is 1e+300; it must be at most 1e+06"),
        (["--sessions", "0"], "--sessions is 0; it must be at least 1"),
        (["--stages", "0"], "--stages is 0; it must be at least 1"),
        (["--allow-origin", "x.example/"], "--allow-origin is x.example/; it must be SCHEME://"),
        (
            ["--host", "0.0.0.0"],
            "give --api-key KEY or --api-key-file FILE, or --no-api-key on a network you trust",
        ),
        (["--api-key-file", "/nowhere"], "cannot read the API keys in /nowhere: No such file"),
        (["--chat-template", "/nowhere"], "cannot read the chat template /nowhere: No such file"),
        (["--connect", "h:1", "--stages", "2"], "--stages is the running cluster's choice"),
        (["--connect", "h:1", "--threads", "2"], "--threads is the running cluster's choice"),
        (["--threads", "0"], "--threads is 0; it must be at least 1"),
        (["--connect", "h:1", "--chat-template", "plain"], "--chat-template is the running"),
        (["--connect", "nowhere"], "--connect nowhere is not HOST:PORT"),
        (["--connect", "10.0..1:7700"], "--connect 10.0..1:7700 is not HOST:PORT"),
        (["--host", "10.0..1", "--no-api-key"], "10.0..1 (--host and --port) is no host name"),
        (["--cluster", "x"], "--cluster goes with --connect"),
        (["--policy", "best"], "unknown policy 'best'"),
    ],
)
def test_serve(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in _line(capsys, cli.main, ["serve", *argv])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--n-ctx", "9"], "did you mean --ctx-size?"),
        (["serve", "--max-model-len", "9"], "did you mean --ctx-size?"),
        (["run", "qwen3-8b"], "what is qwen3-8b to be asked?"),
        (["chat", "qwen3-8b", "-m", "x"], "qwen3-8b and --target both name the model"),
        (["run", "--n-predict", "8"], "did you mean --max-new-tokens?"),
        (["memory", "--target", "x", "--model", "x"], "did you mean --target?"),
        (["run", "--model", "/nowhere", "Why?"], "/nowhere"),
        (["run", "a", "b", "c"], "'c' is one argument too many"),
        (["run", "a", "-n", "9", "b", "--json", "c"], "'c' is one argument too many"),
        (["run", "/nowhere", "-n", "9", "Why?"], "there is no directory /nowhere"),
        (["run", "/nowhere", "-x", "9", "Why?"], "unrecognized arguments: -x 9 Why?"),
        (["plan", "layers", "a/model.gguf"], "a/model.gguf is a model; give it as --target"),
        (["plan", "layers", "qwen3-8b"], "qwen3-8b is a model; give it as --target"),
        (["run", "a", "b", "--prompt", "x"], "'b' is one argument too many"),
        (["run", "/nowhere", "Why?"], "/nowhere"),
        (["run", "/nowhere", "--prompt", "Why?"], "/nowhere"),
        (["serve", "--ssl-keyfile", "x"], "did you mean --tls-key?"),
        (["memory", "--target", "qwen3-9b"], "did you mean qwen3-8b?"),
        (["serve", "--target", ""], "argument -m/--target/--model: is empty; give a value or"),
        (["check", ""], "is empty; give a value or leave it out"),
        (["keys", "/nowhere/keys"], "cannot write the keys in /nowhere/keys: No such file"),
    ],
)
def test_names_of_other_programs_and_words(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert says in _line(capsys, cli.main, argv)


def test_a_model_that_cannot_be_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "check the network" in complaint(capsys, "-m", "org/model", "hello")


def test_a_build_of_torch_for_the_cpu_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncspec.plugins.hf.backend.version", lambda name: "2.9.0+cpu")
    assert "torch 2.9.0+cpu computes on the CPU alone" in complaint(capsys, "--device", "cuda:9")


def test_alone_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "talk with a model in the terminal" in " ".join(capsys.readouterr().out.split())


def test_of_a_folder_with_several_gguf_files_one_is_to_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("m.gguf", "n.gguf"):
        (tmp_path / name).touch()
    assert cli.main(["run", "-m", str(tmp_path), "hello"]) == 2
    expected = f"asyncspec: {tmp_path} has 2 GGUF models; name the file: {tmp_path}/FILE.gguf\n"
    assert capsys.readouterr().err == expected


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert lone_gguf(str(tmp_path)) == str(tmp_path / "m.gguf")
    (tmp_path / "n.gguf").touch()
    assert lone_gguf(str(tmp_path)) == f"llama:{tmp_path}"
    assert lone_gguf("ORG/NAME") == "ORG/NAME"


def test_keys_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none\n\n")
    assert "there is no API key in" in _line(
        capsys, cli.main, ["serve", "--api-key-file", str(file)]
    )
    file.write_text("one\n")
    argv = ["serve", "--api-key-file", str(file), "--no-api-key"]
    assert "--no-api-key is given, but there is an API key" in _line(capsys, cli.main, argv)


def test_comments_in_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\none   # alice\n  # old\n\ttwo\nthr#ee\n#four\n")
    keys = read_keys(file)
    for key in ("one", "two", "thr#ee"):
        keys.check(f"Bearer {key}")
    for key in ("# old", "old", "one   # alice", "four", "#four", "thr"):
        with pytest.raises(ApiError, match="not one of this service"):
            keys.check(f"Bearer {key}")


def _line(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], argv: list[str]
) -> str:
    try:
        code: object = main(argv)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--stages", "9"], "9 stages are more than the target's 8 layers; use at most 8"),
        (["--stages", "two"], "invalid int value: 'two'"),
        (["--policy", "best"], "unknown policy 'best'; there are autoregressive, "),
        (["--temperature", "-1"], "--temperature is -1; it must be 0 (greedy) or more"),
        (["--temperature", "nan"], "--temperature is nan"),
        (
            ["--repetition-penalty", "0"],
            "--repetition-penalty is 0; it must be 1e-06 to 1e+06 (1: none)",
        ),
        (["--presence-penalty", "much"], "invalid float value: 'much'"),
        (["--stop", ""], "--stop: a stop string is empty; give some text"),
        (["--stop", "x"] * 65, "--stop: there are 65 stop strings; give at most 64"),
        (["--stop", "\udcff"], "--stop: a stop string is not UTF-8 text"),
        (["--prompt", "\udcff"], "the prompt is not UTF-8 text"),
        (["--system", "x", "--no-chat"], "--system needs the chat template; leave out --no-chat"),
        (["--system", "x", "--raw"], "--system needs the chat template; leave out --no-chat"),
        (["--system", "\udcff"], "--system is not UTF-8 text"),
        (["--regex", "a\udcff"], "--regex is not UTF-8 text"),
        (["--target", "org/model", "--regex", "(", "x"], "--regex cannot be compiled: invalid"),
        (["--target", "org/model", "--regex", "[^\\s\\S]", "x"], "--regex cannot be compiled: no"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be 1 to 2147483647"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["--quantize", "int2"], "argument --quantize: invalid choice: 'int2'"),
        (["--connect", "h:1", "--prompt", "a", "--quantize", "int8"], "--quantize is the running"),
        (["--mode", "loose"], "argument --mode: invalid choice: 'loose'"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with argument -p/--prompt"),
        (["--prompt-file", "/nowhere/prompt"], "cannot read /nowhere/prompt: No such file"),
        (["--target", "/nowhere/model"], "there is no directory /nowhere/model"),
        (["--target", str(BUNDLED_TARGET)], "there is no prompt"),
        (["--target", __file__], "test_cli_errors.py is a file; give a checkpoint's directory"),
        (["--modle", "x"], "unrecognized arguments: --modle; did you mean --model?"),
        (
            ["--target", "org/model", "--json-schema", "/nowhere/s", "x"],
            "--json-schema: cannot read /nowhere/s: No such file or directory",
        ),
        (["--api-key", "x"], "unrecognized arguments: --api-key\n"),  # an option of serve
        (["--host", "x"], "unrecognized arguments: --host\n"),
        (["--draft", "nosuch"], "there is no nosuch: give a path, an id of the Hub (ORG/NAME)"),
        (["--draft", "twin+ngrm"], "did you mean ngram?"),
        (["--draft", "eagle:nosuch"], "there is no nosuch: give a path, an id of the Hub"),
        (["--target", "org/model", "--prompt-file", "/nowhere/p"], "cannot read /nowhere/p"),
        (["--target", "org/model", "--trace", "/nowhere/t", "x"], "cannot write the trace"),
        (["--target", "org/model", "--log-dir", "/dev/null/logs", "x"], "cannot be made"),
        (["--device", "gpuu"], "device gpuu: torch has none of that name; use one of auto, cpu,"),
        (["--draft", "./nowhere"], "there is no directory ./nowhere"),
        (["--draft", "eagle:./nowhere"], "there is no directory ./nowhere"),
        (["--draft", f"eagle:{BUNDLED_DRAFT}"], "was made for a target with a hidden size of 160"),
        (["--draft", str(BUNDLED_EAGLE)], "has no tokenizer.json"),
        (
            ["--target", str(BUNDLED_DRAFT), "--draft", "eagle:", "--stages", "1"],
            "eagle: alone is the bundled target's own head; use eagle:DIR",
        ),
        (
            ["--target", str(BUNDLED_DRAFT), "--draft", f"eagle:{BUNDLED_EAGLE}", "--stages", "1"],
            "was made for a target with a hidden size of 256, but the target's is",
        ),
        (["--draft", "ngram+none"], "'ngram+none' mixes 'none' with something; leave it out"),
        (["--draft", "ngram+"], "'ngram+' mixes 'nothing' with something; leave it out"),
        (["--draft", "ngram+ngram"], "names a token source twice; leave one out"),
        (["--draft", "eagle:a+eagle:b"], "mixes two heads; only one can read"),
        (["--draft", "twin:int2"], "there is no twin:int2; use twin:int4, twin:int8 or twin:none"),
        (["--draft", "twin+twin:int8"], "'twin+twin:int8' mixes two twins of the target; leave"),
        (["--draft", "none", "--policy", "flowspec"], "policy flowspec needs a token source"),
        (
            ["--prompt", "a", "--trace", "/nowhere/t.json"],
            "cannot write the trace /nowhere/t.json: No such",
        ),
        (["--policy", "lossy-relaxed", "--check"], "policy lossy-relaxed is lossy: it has nothing"),
        (["--connect", "h:1", "--prompt", "a", "--source-apart"], "--source-apart is the running"),
        (["--cluster", "home"], "--cluster goes with --connect"),
        (
            ["--log-dir", "/dev/null/logs"],
            "--log-dir: /dev/null/logs cannot be made: Not a directory",
        ),
        (["--connect", "here", "--prompt", "a"], "--connect here is not HOST:PORT"),
        (["--connect", "h:0", "--prompt", "a"], "--connect h:0 is not HOST:PORT"),
        (["--connect", "h:1", "--prompt", "a", "--stages", "2"], "--stages is the running cluster"),
        (
            ["--connect", "h:1", "--prompt", "a", "--check"],
            "--check needs the target's files; use --config FILE",
        ),
        (["--connect", "h:1", "--prompt", "a", "--policy", "best"], "unknown policy 'best'"),
        (["--config", "/nowhere/c.toml", "--prompt", "a"], "cannot read the cluster file"),
        (["--max-new", "3"], "unrecognized arguments: --max-new; did you mean --max-new-tokens?"),
    ],
)
def test_a_wrong_argument(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    assert says in complaint(capsys, *argv)


def _without(name: str) -> Change:
    return lambda path: (path / name).unlink()


def _written(name: str, text: str) -> Change:
    def write(path: Path) -> None:
        (path / name).write_text(text)

    return write


def _configured(**values: object) -> Change:
    def write(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return write


def _cut_off(path: Path) -> None:
    weights = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("config.json"), "has no config.json"),
        (_written("config.json", "{"), "config.json cannot be read"),
        (_without("tokenizer.json"), "has no tokenizer.json"),
        (_written("tokenizer.json", "[]"), "is not a tokenizer this program can read"),
        (_without("model.safetensors"), "has neither model.safetensors nor"),
        (_written("model.safetensors", "hello"), "is not a whole safetensors file"),
        (_cut_off, "is cut off before tensor"),
        (
            _configured(architectures=["MambaForCausalLM"]),
            "with a recurrent state are of a kind",
        ),
        (_configured(architectures=["NewForCausalLM"]), "NewForCausalLM, which is not supported"),
        (_configured(num_hidden_layers=0), "needs a positive number as num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("part", ["--target", "--draft"])
def test_a_broken_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str, change: Change, says: str
) -> None:
    model = Path(shutil.copytree(BUNDLED_DRAFT, tmp_path / "model"))
    change(model)
    assert says in complaint(capsys, part, str(model), "--stages", "1", "--prompt", "a")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\nnonsense', "line 2 of"),
        ('{"question": "a"}', 'has neither "prompt" nor "turns"'),
        ('{"turns": []}', 'has neither "prompt" nor "turns"'),
        ('{"prompt": "a", "turns": ["b"]}', 'has both "prompt" and "turns"'),
        ('{"prompt": 3}', "is not a prompt: Expected `str | null`, got `int`"),
    ],
)
def test_a_wrong_list_of_prompts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    assert says in complaint(capsys, "--prompts", str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x7f", "\u2029"])
def test_only_line_feeds_end_a_line_of_prompts(tmp_path: Path, separator: str) -> None:
    """JSON lets other separators stand in a string as they are."""
    text = f"one{separator}two"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_text(f"{line}\r\n\n{line}", encoding="utf-8", newline="")
    assert [p.turns for p in answers.read_list(tmp_path / "p.jsonl")] == [(text,), (text,)]


def test_a_prompt_that_no_context_holds_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("asyncspec_nodes.cli.run.Run.work")
    toy = ("--target", "toy:layers=2,vocab=64,context=8", "--stages", "1")
    line = complaint(capsys, *toy, "--prompt", "1 2 3 4 5 6 7 8 9")
    assert "tokens, but the target's context is 8, answer included" in line


def test_a_schema_of_no_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "nonsense"}')
    line = complaint(capsys, "--target", "org/model", "--json-schema", str(file), "x")
    assert f"--json-schema: {file} cannot be compiled: " in line


def test_connecting_to_a_closed_port(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert cli.main(["run", "--connect", f"127.0.0.1:{port}", "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"asyncspec: cannot connect to the draft node at 127.0.0.1:{port}: Connection refused\n"
    )


def test_a_node_that_is_still_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens from its start on, and answers when it has loaded."""
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.05)
    with listen.bind("127.0.0.1", 0, whose="rank 0") as sock:
        where = f"127.0.0.1:{sock.getsockname()[1]}"
        assert cli.main(["run", "--connect", where, "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"asyncspec: {where} does not answer within 0.05 s: if it is a draft node it may still be "
        "loading its model; try again then, or correct the address\n"
    )


CLUSTER = """
[target]
path = "model"
[[node]]
rank = 0
host = "127.0.0.1"
port = 7700
[[node]]
rank = 1
host = "127.0.0.1"
port = {port}
"""


def node_complaint(capsys: pytest.CaptureFixture[str], folder: Path, port: int, *argv: str) -> str:
    """The one line that ``asyncspec-node`` answers with."""
    (folder / "cluster.toml").write_text(CLUSTER.format(port=port))
    return _line(capsys, node_cli.main, [*argv, "--config", str(folder / "cluster.toml")])


def test_a_port_that_is_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = node_complaint(capsys, tmp_path, port, "--role", "verify", "--rank", "1")
    assert line == (
        f"asyncspec-node: cannot listen on 127.0.0.1:{port}: the port is in use; "
        "stop what listens there or change the port of rank 1\n"
    )


@pytest.mark.parametrize(
    ("command", "option"),
    [("serve", "--host and --port"), ("up", "--host and --port"), ("up", "--listen")],
)
def test_a_port_that_is_in_use_is_said_before_a_model_is_read(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where: tuple[str, ...] = ("--port", str(port)) if option != "--listen" else ("--port", "0")
        if option == "--listen":
            where += ("--listen", f"127.0.0.1:{port - 1}")
        # The target would be refused, too.
        line = _line(capsys, cli.main, [command, "--target", "toy:layers=0", *where])
    assert line.startswith("asyncspec: cannot listen on 127.0.0.1:")
    assert f"the port of {option}" in line


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.10", "does not have that address; correct the host of --host and --port"),
        ("box.invalid", "box.invalid (--host and --port) cannot be resolved: "),
    ],
)
def test_an_address_of_another_machine_is_a_mistake_of_a_user(
    command: str, host: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--host", host, "--no-api-key", "--target", "toy:layers=0"]
    assert says in _line(capsys, cli.main, argv)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.10", "does not have that address; correct the host of rank 1"),
        ("box.invalid", "box.invalid (rank 1) cannot be resolved: "),
    ],
)
def test_an_address_that_may_come_later_is_no_mistake_for_supervisors(
    host: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A machine that starts may have its network last."""
    text = CLUSTER.format(port=7701).replace(
        'rank = 1\nhost = "127.0.0.1"', f'rank = 1\nhost = "{host}"'
    )
    (tmp_path / "cluster.toml").write_text(f"{text}[cluster]\ninsecure = true\n")
    argv = ["--role", "verify", "--rank", "1", "--config", str(tmp_path / "cluster.toml")]
    assert node_cli.main(argv) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--role", "verify", "--rank", "0"], "rank 0 is not a verify node"),
        (["--role", "verify", "--rank", "1", "--threads", "0"], "--threads is 0; it must be at"),
        (["--role", "draft", "--rank", "1"], "rank 1 is not a draft node"),
        (["--role", "draft", "--rank", "7"], "where draft node 7 listens: give --listen HOST:PORT"),
        (["--role", "draft", "--rank", "1024"], "--rank is 1024; draft nodes are 0 to 1023"),
        (["--role", "draft", "--rank", "-1"], "--rank is -1; draft nodes are 0 to 1023"),
        (["--role", "draft", "--rank", "7", "--listen", "7700"], "--listen 7700 is not HOST:PORT"),
        (["--role", "draft", "--rank", "7", "--listen", "10.0.0.9:7"], "add a [security] table"),
        (
            ["--role", "verify", "--rank", "1", "--listen", "h:1"],
            "h (--listen) is not a loopback",
        ),
        (["--role", "verify", "--rank", "1", "--source", "none"], "--source is for draft nodes"),
        (["--role", "verify", "--rank", "2"], "has ranks 0 to 1, not 2"),
        (["--role", "serve", "--rank", "1"], "invalid choice: 'serve'"),
        (["--role", "verify", "--rank", "1", "--listen-fd", "999"], "--listen-fd 999 is no socket"),
    ],
)
def test_a_node_that_is_started_wrongly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], says: str
) -> None:
    assert says in node_complaint(capsys, tmp_path, 7701, *argv)


def test_a_source_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--role", "draft", "--rank", "7", "--listen", "127.0.0.1:7709", "--source", "/nowhere"]
    (tmp_path / "cluster.toml").write_text(
        CLUSTER.format(port=7701).replace('"model"', f'"{BUNDLED_TARGET}"')
    )
    config = ["--config", str(tmp_path / "cluster.toml")]
    assert "there is no directory /nowhere" in _line(capsys, node_cli.main, [*argv, *config])


def test_stages_alone_have_no_draft_node_to_ask(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(port=7701).replace("rank = 0", "rank = 2"))
    assert complaint(capsys, "--config", str(file), "--prompt", "a") == (
        "asyncspec: the cluster file has no draft node; give --connect HOST:PORT of one\n"
    )


def test_the_parent_never_imports_torch() -> None:
    code = (
        "import sys\n"
        "from asyncspec_nodes.cli import main as cli, run\n"
        "assert cli.main(['run', '--stages', '9']) == 2\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_version_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "flowspec" in lines
    assert {name for name in POLICIES if "lossy: not what" not in lines[name]} == set(lossless())
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("asyncspec 0.")


def test_a_line_for_a_terminal_that_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it, and nothing else ends of it."""
    ours, theirs = os.openpty()
    os.close(ours)
    terminal = io.TextIOWrapper(io.FileIO(theirs, "w"), write_through=True)
    with pytest.raises(OSError, match="Input/output error"):
        terminal.write("x\n")
    monkeypatch.setattr(sys, "stderr", terminal)
    print_notice("a stage was killed")
    with contextlib.suppress(OSError):  # it still has the lines
        terminal.close()


def test_a_line_of_another_machine_is_one_line_without_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_notice("box \x1b]0;title\x07 has\njoined \u202egnp")
    assert capsys.readouterr().err == "asyncspec: box \\x1b]0;title\\x07 has joined \\u202egnp\n"
    print_notice("x" * 10_000)
    assert len(capsys.readouterr().err) < 5_000
