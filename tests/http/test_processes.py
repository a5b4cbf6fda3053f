"""Real processes and the demo models: the text over HTTP is that of the command line."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
import termios
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from msgspec.structs import replace

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import local_config
from commands import reset_hangup
from http_process import (
    TOY,
    TOY_ASK,
    alive,
    answer,
    first_answer,
    post,
    process,
    served_port,
    started_by,
)
from nodes.background import START
from shared_fork_server import start_node
from tools.testbed.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.asyncio]

PROMPT = "Once upon a time there was a little fox"
SAMPLED = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "11", "--max-new-tokens", "24"]
ASK: dict[str, Any] = {"model": "demo-target", "prompt": PROMPT, "max_tokens": 24}
HOW = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.0}
RECOMMENDED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3}
WAITS = ("--drain-seconds", str(START))
"""When told to stop: other programs may keep the cores busy."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint that recommends how to sample."""
    for file in BUNDLED_TARGET.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **RECOMMENDED}))
    return tmp_path


@pytest.fixture
def want(target: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``asyncspec run`` answers."""
    argv = ["--target", str(target), "--stages", "2", "--prompt", PROMPT, "--json", *SAMPLED]
    assert cli.main(["run", *argv]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
async def test_serve(target: Path, want: dict[str, Any]) -> None:
    argv = ["serve", "--port", "0", "--stages", "2", "--target", str(target)]
    argv += ["--chat-template", "plain", *WAITS]
    lines: list[bytes] = []
    async with (
        process("asyncspec_nodes.cli.main", *argv, "--model-name", "demo-target", said=lines) as (
            child,
            url,
        ),
        aiohttp.ClientSession(url) as web,
    ):
        await check_recommended(lines, web)
        whole = await post(web, "/v1/completions", **ASK, **HOW, return_details=True)
        (choice,) = whole["choices"]
        assert choice["text"] == want["text"]
        assert choice["token_ids"] == want["token_ids"]
        assert choice["finish_reason"] == want["finish_reason"]
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}
        said = await post(web, "/v1/chat/completions", model="demo-target", **chat)
        assert said["usage"]["completion_tokens"] == 5
        # Told to stop, it brings what runs to its end.
        long = {**ASK, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with web.post("/v1/completions", json=long) as running:
            assert running.status == 200
            child.send_signal(signal.SIGTERM)
            lines = [line async for line in running.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
    assert child.returncode == 0


async def check_recommended(said: list[bytes], web: aiohttp.ClientSession) -> None:
    """What the target recommends is said at the start, and done."""
    words = b"temperature 0.9, top_p 0.95, repetition_penalty 1.3: what the target recommends"
    assert [line for line in said if words in line]
    (where,) = (found for line in said if (found := re.search(rb"--connect: (.*):(\d+)", line)))
    client = await Client.connect(where[1].decode(), int(where[2]), "")
    await client.close()
    left = await post(web, "/v1/completions", **ASK, seed=11)
    same = await post(web, "/v1/completions", **ASK, seed=11, **RECOMMENDED)
    other = await post(web, "/v1/completions", **ASK, seed=11, temperature=0)
    assert left["choices"] == same["choices"] != other["choices"]


def cluster_folders(temporary: Path) -> list[Path]:
    """What local clusters have there: their files and logs."""
    return list(temporary.glob("asyncspec-*"))


SERVE = ("asyncspec_nodes.cli.main", "serve", "--port", "0", "--stages", "1", *WAITS, *TOY)
"""For what concerns processes alone: it needs no torch."""


@pytest.mark.slow
async def test_a_terminal_that_closes(tmp_path: Path) -> None:
    """What runs comes to its end, and nothing stays behind."""
    ours, theirs = os.openpty()

    def prepare() -> None:
        reset_hangup()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    terminal = {
        "start_new_session": True,
        "preexec_fn": prepare,
        "env": {**os.environ, "TMPDIR": str(tmp_path)},
    }
    async with (
        process(*SERVE, stdin=theirs, stdout=theirs, **terminal) as (child, url),
        aiohttp.ClientSession(url) as web,
    ):
        os.close(theirs)
        assert cluster_folders(tmp_path)
        long = {**TOY_ASK, "max_tokens": 100, "stream": True}
        async with web.post("/v1/completions", json=long) as running:
            assert running.status == 200
            os.close(ours)  # SIGHUP to who sits in front of it
            assert await running.content.readline()
            child.send_signal(signal.SIGHUP)  # the shell's own
            lines = [line async for line in running.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
    assert child.returncode == 0
    assert not cluster_folders(tmp_path)


async def test_nohup() -> None:
    """Who started it so wants it to outlive the terminal."""
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    async with (
        process(*SERVE, preexec_fn=ignore) as (child, url),
        aiohttp.ClientSession(url) as web,
    ):
        child.send_signal(signal.SIGHUP)
        assert (await post(web, "/v1/completions", **TOY_ASK))["choices"]
        assert (await post(web, "/v1/completions", **TOY_ASK))["choices"]
        child.send_signal(signal.SIGTERM)
    assert child.returncode == 0


@pytest.mark.slow
async def test_serve_is_alive_while_it_loads() -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", "serve"]
    child = await asyncio.create_subprocess_exec(
        *(*command, "--port", str(port), "--stages", "1"), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
            assert await first_answer(web, "/health") == (200, {"status": "ok"})
            while not (nodes := started_by(child.pid)):
                assert (await answer(web, "/health"))[0] == 200
            for node in nodes:  # which import torch first of all: they get no further
                node.suspend()
            status, said = await answer(web, "/ready")
            assert (status, said["error"]["code"]) == (503, "loading")
            assert re.search(r"stage 1 \((starting|loading)", said["error"]["message"])
            async with web.post("/v1/completions", json=ASK) as reply:
                assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
            for node in nodes:
                node.resume()
            assert (await answer(web, "/health"))[0] == 200
            assert await served_port(child.stderr) == port
            while (await answer(web, "/ready"))[0] != 200:  # until its nodes are linked
                assert (await answer(web, "/health"))[0] == 200
            assert (await post(web, "/v1/completions", **ASK))["choices"]
        child.terminate()
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_a_signal_ends_it_while_it_loads() -> None:
    """Also where somebody holds a connection to it."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", "serve"]
    child = await asyncio.create_subprocess_exec(
        *(*command, "--port", str(port), "--stages", "1"), stderr=asyncio.subprocess.PIPE
    )
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
        assert (await first_answer(web, "/health"))[0] == 200
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        _, said = await child.communicate()
    assert (child.returncode, said) == (0, b"")
    assert not alive(family)


@pytest.mark.slow
async def test_serve_is_alive_while_it_connects() -> None:
    """And where that comes to nothing, its end is one line."""
    said_hello, leave = asyncio.Event(), asyncio.Event()

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            said_hello.set()
            await leave.wait()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(node, "127.0.0.1", 0) as server:
        where = "{}:{}".format(*server.sockets[0].getsockname())
        command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", "serve"]
        child = await asyncio.create_subprocess_exec(
            *(*command, "--port", str(port), "--connect", where), stderr=asyncio.subprocess.PIPE
        )
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
            await said_hello.wait()
            assert (await answer(web, "/health"))[0] == 200
            status, said = await answer(web, "/ready")
            assert (status, said["error"]["code"]) == (503, "loading")
            assert said["error"]["message"].endswith(f"it waits for the draft node at {where}")
        leave.set()
        _, line = await child.communicate()
    assert child.returncode == 1
    why = "refuses this client: the peer closed the connection"
    assert line.decode() == f"asyncspec: the node at {where} {why}\n"


@pytest.mark.nightly
async def test_a_draft_node_is_alive_while_it_loads(tmp_path: Path) -> None:
    """Then it says which stage it waits for."""
    config = local_config(TargetTable(path=str(BUNDLED_TARGET)), DraftTable(source="ngram"), 1, 2)
    file, port = tmp_path / "cluster.toml", free_port()
    text = to_toml(config)
    for _ in config.node:
        text = text.replace("port = 1\n", f"port = {free_port()}\n", 1)
    file.write_text(text)
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.node.cli", "--role", "draft"]
    child = await asyncio.create_subprocess_exec(
        *(*command, "--rank", "0", "--config", str(file), "--http", str(port)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
            status, said = await first_answer(web, "/ready")
            assert (status, said["error"]["code"]) == (503, "loading")
            assert "it waits for the draft node (" in said["error"]["message"]
            assert (await answer(web, "/health"))[0] == 200
            assert await served_port(child.stderr) == port
            status, said = await answer(web, "/ready")
            assert (status, said["error"]["code"]) == (503, "unavailable")
            assert "stage 1" in said["error"]["message"]
        child.terminate()
        await child.communicate()
        assert child.returncode == 0
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_http_on_the_draft_node(tmp_path: Path) -> None:
    """Nodes as they are started by hand: the draft node serves HTTP itself, a stage its probes."""
    target = TargetTable(path=str(BUNDLED_TARGET), chat_template="plain")
    config = local_config(target, DraftTable(source="ngram"), 1, 2)
    # The stage may still be loading when the request comes.
    config = replace(config, limits=replace(config.limits, rejoin_seconds=START))
    draft, verify = config.node
    probes = free_port()
    config = replace(config, node=(draft, replace(verify, http=probes)))
    ports = [free_port() for _ in config.node]
    file = tmp_path / "cluster.toml"
    text = to_toml(config)
    for port in ports:
        text = text.replace("port = 1\n", f"port = {port}\n", 1)
    file.write_text(text)
    keys = tmp_path / "keys"
    keys.write_text("# mine\nsecret\n")
    with (tmp_path / "log").open("wb") as log:
        words = ["--role", "verify", "--rank", "1", "--config", str(file), "--supervised"]
        stage = start_node([*words, "--log-format", "json"], log)
    try:
        node = ["--role", "draft", "--rank", "0", "--config", str(file), "--http", "0"]
        node += ["--api-key-file", str(keys), "--model-name", "fox", "--allow-origin", "*"]
        async with process("asyncspec_nodes.node.cli", *node) as (child, url):
            async with aiohttp.ClientSession(url) as web, web.get("/v1/models") as reply:
                assert reply.status == 401
                assert reply.headers["Access-Control-Allow-Origin"] == "*"
            bearer = {"Authorization": "Bearer secret"}
            async with aiohttp.ClientSession(url, headers=bearer) as web:
                whole = await post(web, "/v1/completions", **{**ASK, "model": "fox"}, **HOW)
                assert whole["usage"]["completion_tokens"] == 24
            async with aiohttp.ClientSession(f"http://127.0.0.1:{probes}") as web:
                assert (await answer(web, "/ready"))[0] == 200
                async with web.get("/metrics") as reply:
                    counted = re.search(
                        r'node_rows_total{.*role="verify"} (.*)', await reply.text()
                    )
            assert counted is not None
            assert float(counted[1]) >= 24
            child.send_signal(signal.SIGTERM)
        assert child.returncode == 0
    finally:
        stage.communicate(timeout=START)
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {"event": "http", "level": "info", "rank": 1, "port": probes}.items() <= next(
        line.items() for line in logged if line["event"] == "http"
    )
