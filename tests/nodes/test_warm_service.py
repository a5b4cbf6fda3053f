"""A service in the background, and commands that ask it in place of a cluster of their own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec.backend.base import EngineOptions
from asyncspec_nodes.cli import background, run_options, warm_service
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.local import service_file
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.local.service_file import ServiceFile, ServiceState
from asyncspec_protocol.ids import DRAFT
from commands import usage_error

CONFIG = local_config(TargetTable(path="/m"), DraftTable(source="/d"), 3, 4)
SERVICE = ServiceState(
    pid=1,
    version=service_file.program_version(),
    started=0.0,
    port=8000,
    pending="",
    model="m",
    config=CONFIG,
)
TOY = ("--target", "toy:layers=4,vocab=64,context=8192", "--draft", "none", "--stages", "1")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def misfit(wanted: Config, *explicit: str, served: Config = CONFIG) -> str:
    return warm_service.misfit(wanted, explicit, replace(SERVICE, config=served))


def with_target(**changes: Any) -> Config:
    return replace(CONFIG, target=replace(CONFIG.target, **changes))


def with_draft(source: str, policy: str = "flow") -> Config:
    return replace(CONFIG, draft=DraftTable(source=source, policy=policy))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("path", "/other"), ("dtype", "float16"), ("mode", "fast"), ("quantize", "int8")),
        *(("chat_template", "plain"), ("generation_config", "none")),
    ],
)
def test_what_changes_the_text_must_be_the_same(key: str, value: str) -> None:
    assert not misfit(CONFIG)
    assert misfit(with_target(**{key: value}))
    assert misfit(CONFIG, served=with_target(**{key: value}))


def test_what_changes_the_speed_must_be_as_the_user_says() -> None:
    for key, wanted, served in (
        ("stages", local_config(CONFIG.target, CONFIG.draft, 2, 1), CONFIG),
        ("device", with_target(device="cpu"), CONFIG),
        ("gpu_layers", replace(CONFIG, llama=EngineOptions(gpu_layers=3)), CONFIG),
        ("draft", with_draft("/e"), CONFIG),
        ("policy", with_draft("/d"), with_draft("none", "autoregressive")),
    ):
        assert not misfit(wanted, served=served)
        assert misfit(wanted, key, served=served)


def test_every_service_decodes_without_a_draft() -> None:
    """As each request says its policy."""
    assert not misfit(with_draft("none", "autoregressive"), "draft", "policy")


def test_a_context_is_enough_or_not() -> None:
    def limited(context: int) -> Config:
        return replace(CONFIG, limits=replace(CONFIG.limits, context=context))

    assert not misfit(limited(100), "ctx_size")
    assert not misfit(limited(100), "ctx_size", served=limited(100))
    assert not misfit(CONFIG, served=limited(100))
    assert misfit(limited(101), "ctx_size", served=limited(100))


@pytest.mark.parametrize("key", warm_service.OWN)
def test_what_a_service_does_not_have(key: str) -> None:
    assert misfit(CONFIG, key).endswith("needs a cluster of its own")


def test_services_that_cannot_be_asked() -> None:
    paced = replace(CONFIG, pace={1: PaceTable(seconds=1.0)})
    for state in (
        replace(SERVICE, version="0.0.1"),
        replace(SERVICE, config=None),
        replace(SERVICE, config=paced),
    ):
        assert warm_service.misfit(CONFIG, (), state)


def arguments(*words: str) -> argparse.Namespace:
    parser = Parser()
    run_options.add_arguments(parser)
    return parser.parse_args(words)


def test_a_service_that_loads_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it will serve what is asked for, and until it ends."""
    looks = 0

    def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        file.loads(f"step {looks}")
        if looks == 3:
            file.serves("http://127.0.0.1:8000", "m", CONFIG, "bitwise")

    monkeypatch.setattr("asyncspec_nodes.cli.warm_service.time.sleep", look)
    with ServiceFile(8000, 60.0, CONFIG) as file:
        service = warm_service.find(arguments(), CONFIG)
    assert service is not None
    assert (looks, service.guarantee) == (3, "bitwise")
    assert "still loads, and is waited for" in capsys.readouterr().err
    with ServiceFile(8000, 60.0, CONFIG):
        assert warm_service.find(arguments(), with_target(path="/other")) is None
    assert looks == 3
    ending = ExitStack()
    monkeypatch.setattr(
        "asyncspec_nodes.cli.warm_service.time.sleep", lambda seconds: ending.close()
    )
    with ending:
        ending.enter_context(ServiceFile(8000, 60.0, CONFIG))
        assert warm_service.find(arguments(), CONFIG) is None
    assert "it has ended before it served" in capsys.readouterr().err


def test_a_log_begins_anew_where_it_is_long(tmp_path: Path) -> None:
    service_file.make_folder()
    path = service_file.log_path(8000)
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * 101)
        background.bound_log(8000, log.fileno(), limit=101)
        assert path.stat().st_size == 101
        background.bound_log(8001, log.fileno(), limit=100)  # another service's
        assert path.stat().st_size == 101
        background.bound_log(8000, log.fileno(), limit=100)
        log.write(b"y")
    assert path.read_bytes() == b"y"
    assert path.with_suffix(".log.1").read_bytes() == b"x" * 101


def test_the_state_of_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "no service runs" in capsys.readouterr().out
    with ServiceFile(8000, 60.0, CONFIG) as file:
        file.loads("stage 1 (loading weights)")
        assert cli.main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("a service on port 8000, started 0 s ago, process ")
        assert lines[1:] == ["  loads     stage 1 (loading weights)"]
        # Whatever it says of itself, its draft node does not answer.
        file.serves("http://127.0.0.1:8000", "m", CONFIG, "bitwise")
        assert cli.main(["status", "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        shown = json.loads(line)
        assert (shown["service"]["model"], shown["nodes"]) == ("m", [])
        assert "127.0.0.1:1" in shown["problem"]


def test_how_long_ago() -> None:
    ages = [SERVICE.age(seconds) for seconds in (5, 200, 7300, 90000)]
    assert ages == ["5 s ago", "3 min ago", "2 h ago", "1 d ago"]


def test_the_file_of_a_service() -> None:
    """Only this user's to read; gone with its process, whether that could remove it or not."""
    with ServiceFile(8000, 60.0) as file:
        (starting,) = service_file.running()
        assert starting.pending
        assert starting.pid == os.getpid()
        file.loads("stage 1 (loading weights)")
        file.serves("http://127.0.0.1:8000", "m", CONFIG, "bitwise")
        (state,) = service_file.running()
        assert (state.pending, state.config, state.guarantee) == ("", CONFIG, "bitwise")
        path = service_file.folder() / f"{os.getpid()}.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        data = path.read_bytes()
        assert service_file.is_running(state)
    assert service_file.running() == []
    assert not path.exists()
    path.write_bytes(data)  # as of a process that was killed
    assert not service_file.is_running(state)
    assert service_file.running() == []
    assert not path.exists()


def test_a_file_of_another_version_can_be_ended_and_not_used() -> None:
    with ServiceFile(8000, 60.0) as file:
        path = service_file.folder() / f"{os.getpid()}.json"
        text = path.read_text().replace(service_file.program_version(), "9.9.9")
        path.write_text(text.replace("starting", "?").replace('"config":null', '"config":7'))
        (state,) = service_file.running()
        assert (state.version, state.port, state.config) == ("9.9.9", 8000, None)
        path.write_text('{"pid":')  # half of a change
        assert service_file.running() == []
        assert path.exists()
        file.loads("the rest")
        assert service_file.running()


def test_changed_files_of_a_model(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    os.utime(model, (1, 5))
    assert service_file.last_change(str(model)) == service_file.last_change(f"llama:{model}") == 5
    assert service_file.last_change("toy:layers=2") == 0


@contextmanager
def toy_service() -> Iterator[ServiceState]:
    """A toy's."""
    assert cli.main(["serve", "--background", "--port", "0", *TOY]) == 0
    try:
        (state,) = service_file.running()
        yield state
    finally:
        assert cli.main(["serve", "--stop"]) == 0
    os.waitpid(state.pid, 0)


@pytest.mark.processes
def test_commands_ask_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    with toy_service() as service:
        said = capsys.readouterr().err
        for part in (service.url, "service-any.log", "serve --stop"):
            assert part in said
        run = ["run", *TOY[:4], "--ignore-eos", "-p", "1 2"]
        assert cli.main([*run, "-n", "20"]) == 0
        captured = capsys.readouterr()
        assert f"using the service on port {service.port}, started " in captured.err
        assert len(captured.out.rstrip("\n")) == 20
        assert cli.main(["status"]) == 0
        state = capsys.readouterr().out
        for part in (service.url, "0 running, 0 waiting; 1 answered (20 tokens)", "3 processes"):
            assert part in state
        assert service.config is not None
        draft = service.config.at(DRAFT)
        assert cli.main(["status", "--connect", f"{draft.host}:{draft.port}"]) == 0
        assert "layers 0 to 3; busy" in capsys.readouterr().out
        # Ctrl-C ends the command alone.
        command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", *run]
        with subprocess.Popen(command, stdout=-1, stderr=-1) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            child.send_signal(signal.SIGINT)
            child.communicate()
            assert child.returncode == 1
        assert service_file.running() == [service]
        again = ("serve", "--background", "--port", str(service.port), *TOY)
        assert "asyncspec serve --stop ends it" in usage_error(capsys, *again)


def test_a_log_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """What the service says of its end would be lost."""
    service_file.make_folder()
    service_file.log_path(0).symlink_to("/dev/full")
    said = usage_error(capsys, "serve", "--background", "--port", "0", *TOY)
    assert "service-any.log: No space left on device" in said


@pytest.mark.processes
def test_a_service_that_does_not_start(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its error is the command's."""
    assert cli.main(["serve", "--background", "--port", "0", "--target", "toy:layers=0"]) == 2
    assert capsysbinary.readouterr().err.count(b"\n") == 1
    assert service_file.running() == []
