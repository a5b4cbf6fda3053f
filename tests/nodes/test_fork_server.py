"""Nodes that are forked end as those that are started, and with what they were forked from."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import IO

import psutil
import pytest
from msgspec.structs import replace

from asyncspec.backend.threads import COUNT_VARIABLES
from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.cluster.file import load, to_toml
from asyncspec_nodes.local import cluster, fork_server
from asyncspec_nodes.local.children import FORKS, Again, ChildNode, ForkedProcess, ForkServerClient
from asyncspec_nodes.local.cluster import FILE, LocalLauncher, local_config
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import FailureReport, ReadyReport, Report, read_report
from asyncspec_nodes.node.resources import cores
from nodes.background import files_left, no_process_left

pytestmark = [
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.skipif(not FORKS, reason="nodes are not forked on this system"),
]

TOY = "toy:layers=2,vocab=64"
"""Forking concerns processes alone; ``tests/nodes/test_processes.py`` has forks with torch."""

Act = Callable[[ForkServerClient, IO[bytes]], Awaitable[None]]


@pytest.fixture(autouse=True)
def own_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters here have fork servers of their own."""
    monkeypatch.setattr(cluster, "ForkServerClient", ForkServerClient)


def arguments(file: Path, *more: str) -> list[str]:
    """A stage's."""
    return ["--role", "verify", "--rank", "1", "--config", str(file), *more]


def forked_by(file: Path, log: Path, act: Act) -> None:
    """Do something with a server; nothing is left of it."""

    async def main() -> None:
        forking = ForkServerClient(file, log.parent)
        try:
            with log.open("wb") as stderr:
                await act(forking, stderr)
        finally:
            await forking.close()

    with no_process_left():
        asyncio.run(main())


@pytest.fixture
def cluster_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Parameter: the target, if not the toy one."""
    target = TargetTable(path=getattr(request, "param", TOY))
    draft = DraftTable("none", "autoregressive")
    launch = LocalLauncher(forks=False)
    launch.prepare(local_config(target, draft, 1, 1), tmp_path)
    asyncio.run(launch.close())
    return tmp_path / FILE


@asynccontextmanager
async def serving(
    forking: ForkServerClient, file: Path, log: IO[bytes]
) -> AsyncIterator[ForkedProcess]:
    """A stage that serves."""
    async with reporting(forking, file, log) as (node, _):
        yield node


@asynccontextmanager
async def reporting(
    forking: ForkServerClient, file: Path, log: IO[bytes]
) -> AsyncIterator[tuple[ForkedProcess, ReadyReport]]:
    """A stage that serves, and what it said then."""
    with listen.loopback() as sock:
        node = await forking.fork(arguments(file, "--supervised"), [sock.fileno()], log)
    with closing(node):
        async for line in node.stdout:
            if isinstance(report := read_report(line), ReadyReport):
                yield node, report


def test_what_has_imported_everything_says_so_and_leaves_nothing(
    cluster_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        await forking.prepare(log)
        await forking.imported(log)

    forked_by(cluster_file, log, act)
    assert not log.read_text()


@pytest.mark.slow
def test_a_node_that_finds_a_mistake_says_so_and_has_its_exit_code(tmp_path: Path) -> None:
    missing, log = tmp_path / "cluster.toml", tmp_path / "log"

    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        node = await forking.fork(arguments(missing, "--supervised"), [], stderr)
        with closing(node):
            (line,) = [line async for line in node.stdout]
            report = read_report(line)
            assert isinstance(report, FailureReport)
            assert str(missing) in report.text
            assert await node.wait() == node.returncode == 2

    forked_by(missing, log, act)
    assert log.read_text().startswith("asyncspec-node: ")


def test_a_node_stops_when_it_is_asked_to_and_says_who_it_is(
    cluster_file: Path, tmp_path: Path
) -> None:
    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        async with serving(forking, cluster_file, stderr) as node:
            assert node.returncode is None
            title = " ".join(psutil.Process(node.pid).cmdline())
            assert title.startswith("asyncspec-node --role verify --rank 1 ")
            assert os.getpgid(node.pid) == node.pid
            node.terminate()
            assert await node.wait() == 0
        async with serving(forking, cluster_file, stderr) as node:
            os.kill(node.pid, signal.SIGKILL)
            assert await node.wait() == node.returncode == -signal.SIGKILL

    forked_by(cluster_file, tmp_path / "log", act)


def test_nodes_end_with_their_server_and_the_next_gets_another(
    cluster_file: Path, tmp_path: Path
) -> None:
    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        async with serving(forking, cluster_file, stderr) as node:
            family = psutil.Process(node.pid).parents()
            (server,) = [p for p in family if fork_server.__name__ in p.cmdline()]
            server.kill()
            assert await node.wait() == -signal.SIGKILL
        async with serving(forking, cluster_file, stderr) as node:
            await forking.close()
            assert await node.wait() == -signal.SIGKILL

    forked_by(cluster_file, tmp_path / "log", act)


@pytest.mark.nightly
@pytest.mark.parametrize("cluster_file", [str(BUNDLED_TARGET)], indirect=True, ids=["torch"])
def test_nodes_share_the_cores(
    cluster_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COUNT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # The draft node is elsewhere.
    config = load(cluster_file)
    away = replace(config.at(0), host="127.0.0.2")
    cluster_file.write_text(to_toml(replace(config, node=(config.at(1), away))))

    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        async with reporting(forking, cluster_file, stderr) as (node, said):
            assert said.threads == cores()
            node.terminate()
            assert await node.wait() == 0

    forked_by(cluster_file, tmp_path / "log", act)


def imports(file: Path) -> None:
    """Wait until this file's server is in the middle of its imports."""
    while True:
        for child in psutil.Process().children():
            if str(file) in child.cmdline() and any(
                "/msgspec/" in mapped.path for mapped in child.memory_maps()
            ):
                return


def test_waiting_for_the_imports_can_be_cancelled(cluster_file: Path, tmp_path: Path) -> None:
    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        ordered = asyncio.create_task(forking.fork(arguments(cluster_file), [], stderr))
        await asyncio.to_thread(imports, cluster_file)
        ordered.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ordered

    forked_by(cluster_file, tmp_path / "log", act)


def test_too_many_open_files_is_an_error(cluster_file: Path, tmp_path: Path) -> None:
    """It is not the server's end, which would not come."""
    log = tmp_path / "log"

    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        async with serving(forking, cluster_file, stderr) as node:
            with files_left(4), pytest.raises(ClusterError, match=r"^stage 1 cannot be started: "):
                await ChildNode.start(
                    1, "verify", cluster_file, None, log, forking=forking, again="ended"
                )
            node.terminate()
            assert await node.wait() == 0

    forked_by(cluster_file, log, act)


def test_a_server_that_ends_is_named(
    cluster_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no python today >&2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))

    async def act(forking: ForkServerClient, stderr: IO[bytes]) -> None:
        with pytest.raises(ClusterError, match=r"forked from has ended \(no python today\)$"):
            await forking.fork(arguments(cluster_file), [], stderr)

    forked_by(cluster_file, tmp_path / "log", act)


@pytest.mark.slow
def test_a_server_that_imports_for_ever_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(cluster, "START_SECONDS", 0.2)
    target, draft = TargetTable(path=TOY), DraftTable("none", "autoregressive")

    async def main() -> None:
        async with cluster.LocalCluster(local_config(target, draft, 1, 1), lambda report: None):
            raise AssertionError("there is nobody to serve")

    said = r"^the draft node, stage 1 did not load within 0\.2 s$"
    with no_process_left(), pytest.raises(ClusterError, match=said):
        asyncio.run(asyncio.wait_for(main(), 240))


def test_a_cluster_serves_when_the_last_node_does_that_was_started() -> None:
    """Not when those do that were started so far."""
    target, draft = TargetTable(path=TOY), DraftTable("none", "autoregressive")
    served: dict[int, asyncio.Event] = {0: asyncio.Event(), 1: asyncio.Event()}

    class Slow(LocalLauncher):
        async def start(self, rank: int, log: Path, *, again: Again) -> ChildNode:
            if rank:
                await served[0].wait()
            return await super().start(rank, log, again=again)

    def received(report: Report) -> None:
        if isinstance(report, ReadyReport):
            served[report.rank].set()

    async def main() -> None:
        config = local_config(target, draft, 1, 1)
        async with cluster.LocalCluster(config, received, launch=Slow()):
            assert served[1].is_set()

    with no_process_left():
        asyncio.run(asyncio.wait_for(main(), 240))
