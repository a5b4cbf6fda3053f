"""``asyncspec up --ray``: machines as actors of a Ray cluster. The last test needs Ray."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join.ray.launcher import RayLauncher, check_installed
from asyncspec_nodes.plugins.join.ray.messages import RayOptions

TOKEN = "asp1-abc"
DRIVER = """
import json, sys
order = json.loads(sys.stdin.readline())
def say(tag, **fields):
    print(json.dumps({"type": tag, **fields}), flush=True)
print("Ray says something else")
say("placed", nodes=order["machines"])
say("notice", text=order["token"])
"""
FAULT = 'say("fault", text="there is no Ray cluster", user=True)\n'
UNTIL_THE_END = 'sys.stdin.read()\nopen(sys.argv[1], "w").close()\n'


def program(rest: str, *words: str) -> tuple[str, ...]:
    """A driver without Ray."""
    return (sys.executable, "-S", "-c", DRIVER + rest, *words)


@pytest.mark.asyncio
async def test_a_launcher_says_what_its_driver_does_and_ends_it(tmp_path: Path) -> None:
    reported: asyncio.Queue[str] = asyncio.Queue()
    ended = tmp_path / "ended"
    words = program(UNTIL_THE_END, str(ended))
    async with RayLauncher(RayOptions(2), reported.put_nowait, words) as launcher:
        launcher.start(TOKEN)
        assert await reported.get() == "Ray starts 2 machines"
        assert await reported.get() == TOKEN
    assert ended.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rest", "kind", "text"),
    [(FAULT, UserError, "there is no Ray cluster"), ("sys.exit(3)", ClusterError, "ended with 3")],
)
async def test_the_end_of_a_driver_is_an_error(rest: str, kind: type[Exception], text: str) -> None:
    async with RayLauncher(RayOptions(1), lambda line: None, program(rest)) as launcher:
        launcher.start(TOKEN)
        with pytest.raises(kind, match=text):
            await launcher.while_it_runs(asyncio.Event().wait())


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_user_is_told_what_to_install() -> None:
    with pytest.raises(UserError, match=r"asyncspec\[ray\]"):
        check_installed()


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """Three raylets with a processor each, beside the head."""
    utils = pytest.importorskip("ray.cluster_utils", reason="pip install 'asyncspec[ray]'")
    small = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, **small}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, **small)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def raylet_of_an_actor(cluster: Any) -> Any:
    """The Ray node whose child runs a machine."""
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    parents = {int(line.split()[0]) for line in listed.stdout.splitlines()[1:] if "ray::M" in line}
    return next(
        node
        for node in cluster.worker_nodes
        if any(one.process.pid in parents for one in node.all_processes["raylet"])
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_answer_goes_on_when_ray_loses_a_machine(ray_cluster: Any, tmp_path: Path) -> None:
    """Its actor starts on another Ray node, and its layers are held again; the text is the same as
    without the loss."""
    with listen.bind("127.0.0.1", 0, whose="a test") as sock:
        port = sock.getsockname()[1]
    words = ["up", "--ray", "2", "--ray-address", ray_cluster.address, "--listen", "127.0.0.1:0"]
    words += ["--port", str(port), "--stages", "2", "--draft", "ngram"]
    words += ["--token-file", str(tmp_path / "up.json")]
    up = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncspec_nodes.cli.main", *words
    )
    ask = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:
            deadline = time.monotonic() + 200
            while True:
                try:
                    async with web.get("/ready") as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                assert up.returncode is None
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)
            text = ""
            async with web.post("/v1/completions", json={**ask, "stream": True}) as reply:
                killed = False
                async for line in reply.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    if len(text) > 100 and not killed:
                        killed = True
                        ray_cluster.remove_node(
                            raylet_of_an_actor(ray_cluster), allow_graceful=False
                        )
            assert killed
            async with web.post("/v1/completions", json=ask) as reply:
                (choice,) = (await reply.json())["choices"]
            assert text == choice["text"]
    finally:
        if up.returncode is None:
            up.terminate()
        assert await up.wait() == 0
