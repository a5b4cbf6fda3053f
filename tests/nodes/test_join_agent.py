"""A machine that has joined: failures of its stages, its folder, and where its token comes from."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import ReadyReport
from asyncspec_nodes.plugins.join import join_command, messages
from asyncspec_nodes.plugins.join import stages as stages_module
from asyncspec_nodes.plugins.join.agent import Agent, AgentOptions
from asyncspec_nodes.plugins.join.authority import make_key, make_request
from asyncspec_nodes.plugins.join.connection import Connector
from asyncspec_nodes.plugins.join.folder import machine_folder
from asyncspec_nodes.plugins.join.join_command import read_token
from asyncspec_nodes.plugins.join.messages import (
    Admitted,
    Failed,
    FromMember,
    Measured,
    Orders,
    Prepared,
    Refused,
    Serving,
    ToMember,
)
from asyncspec_nodes.plugins.join.stages import Stages
from asyncspec_nodes.plugins.join.token import Token, TokenFile, new_cluster

TOKEN = Token(("127.0.0.1",), 1, bytes(32), bytes(16))


class Channel:
    """A connection on which some messages come; it keeps what is sent."""

    def __init__(self, *come: ToMember) -> None:
        self._come = come
        self.sent: list[FromMember] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[aiohttp.WSMessage]:
        for message in self._come:
            raw = messages.encode(message)
            yield aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, raw, None)

    async def send_str(self, text: str) -> None:
        self.sent.append(messages.decode(text, FromMember))  # type: ignore[arg-type]


def agent(folder: Path, channel: Channel | None = None) -> Agent:
    options = AgentOptions("one", target="/srv/target", memory=1, speed=1.0)
    made = Agent(TOKEN, options, [], folder, lambda line: None)
    made._channel = channel  # type: ignore[assignment]
    return made


@pytest.mark.asyncio
async def test_a_machine_says_where_it_is_faster_than_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel()
    member = agent(tmp_path, channel)
    speeds = [2.0, 3.0, 1.05]
    monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.MEASURE_SECONDS", (0.0,))
    monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.read_speed", speeds.pop)
    # It measures for as long as it runs, here until there are no speeds any more.
    with pytest.raises(IndexError):
        await member._measure_again(1.0)
    assert channel.sent == [Measured(3.0)]
    assert member._offer().speed == 3.0


@pytest.mark.asyncio
@pytest.mark.parametrize(("user", "error"), [(True, UserError), (False, ClusterError)])
async def test_only_what_a_user_can_change_is_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: bool, error: type[Exception]
) -> None:
    async def connect(self: Connector, session: aiohttp.ClientSession) -> Channel:
        return Channel(Refused("its stage has failed: why", user))

    monkeypatch.setattr(Connector, "connect", connect)
    async with asyncio.timeout(240):
        with pytest.raises(error, match="its stage has failed: why"):
            await agent(tmp_path).run()


@pytest.mark.asyncio
async def test_a_stage_whose_files_cannot_be_written_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    channel = Channel()
    one = agent(folder, channel)
    (folder / "node.key").unlink()
    folder.rmdir()
    cluster = '[target]\npath = "/srv/target"\n[[node]]\nrank = 0\n'
    one._stages._read(Orders(cluster, (), (), 1))
    one._stages._versions[1] = 7
    await one._stages._keep(1, 0, (0, 1))
    (failed,) = channel.sent
    assert isinstance(failed, Failed)
    assert (failed.version, failed.rank, failed.user) == (7, 1, False)
    assert "No such file" in failed.text


@pytest.mark.asyncio
async def test_orders_that_cannot_be_read_are_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="orders of another version came"):
        await agent(tmp_path)._receive(Orders("[", (), (), 1))


@pytest.mark.asyncio
async def test_a_failure_without_a_connection_is_reported_with_the_next(tmp_path: Path) -> None:
    machine = agent(tmp_path)
    machine._stages._read(Orders(CLUSTER, (), (), 1))
    (tmp_path / "rank-1.toml").mkdir()
    machine._stages._versions[1] = 7
    await machine._stages._keep(1, 0, (0, 1))
    channel = Channel(Admitted("", ""))
    await machine._serve(channel)  # type: ignore[arg-type]
    assert [(type(one), one.rank) for one in channel.sent] == [(Failed, 1)]  # type: ignore[union-attr]


HOLDS = """
import sys
from asyncspec_nodes.plugins.join.folder import machine_folder

with machine_folder() as folder:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"many")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def start() -> tuple[subprocess.Popen[str], Path]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        return child, Path(child.stdout.readline().strip())

    killed, left = start()
    running, held = start()
    try:
        assert (left / "model" / "weights").exists()
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=240)
        with machine_folder() as folder:
            assert folder.parent == left.parent == tmp_path / "asyncspec"
            assert folder.stat().st_mode & 0o777 == 0o700
            assert not left.exists()
            assert (held / "model" / "weights").exists()
        assert not folder.exists()
    finally:
        running.communicate("", timeout=240)
    assert running.returncode == 0
    assert not held.exists()


def test_without_a_folder_for_caches_the_temporary_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with machine_folder() as folder:
        (folder / "model").mkdir()
        assert file not in folder.parents
    assert not folder.exists()


def test_the_token_comes_from_stdin_and_the_environment_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(join_command, "getproctitle", lambda: f"asyncspec join {TOKEN}")
    monkeypatch.setattr(join_command, "setproctitle", titles.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TOKEN}\n"))
    assert read_token("-") == TOKEN
    monkeypatch.setenv("ASYNCSPEC_TOKEN", str(TOKEN))
    assert read_token(None) == TOKEN
    assert not titles
    monkeypatch.delenv("ASYNCSPEC_TOKEN")
    with pytest.raises(UserError, match="ASYNCSPEC_TOKEN"):
        read_token(None)
    # Other users of the machine see command lines.
    assert read_token(str(TOKEN)) == TOKEN
    assert titles == ["asyncspec join TOKEN"]


def test_a_token_file_that_others_can_read_becomes_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "up.json"
    file.touch()
    file.chmod(0o644)
    with TokenFile(file, lambda line: None) as stored:
        assert file.stat().st_mode & 0o777 == 0o600
        stored.write(new_cluster("one"))
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["ä" * 40, "x" * 65, "€" * 50, "", os.fsdecode(b"\xff")])
def test_any_name_fits_into_a_certificate(name: str) -> None:
    assert "REQUEST" in make_request(make_key(), name)


@pytest.mark.asyncio
async def test_a_stage_does_not_reach_what_its_own_machine_loads_for_later(tmp_path: Path) -> None:
    """The next stage lives, though its machine is suspected."""
    stages = Loaded(tmp_path, Channel())
    orders = Orders(CLUSTER, (1,), (0,), 7, standby=(2,), standby_ports=(0,))
    await stages.follow(orders)
    await asyncio.sleep(0)
    written = {node.rank: node.host for node in load(tmp_path / "rank-1.toml").node}
    assert (written[1], written[2]) == ("127.0.0.1", "10.0.0.3")
    await stages.stop_all()
    stages.listening.close()


class Loaded(Stages):
    """Stages that load at once, in no process: what is started, and stopped."""

    def __init__(self, folder: Path, channel: Channel) -> None:
        async def tell(message: FromMember) -> None:
            channel.sent.append(message)

        self.listening = listen.loopback()
        connector = Connector(TOKEN, None)
        connector.host = "10.0.0.1"
        super().__init__(
            *([self.listening], folder, connector, "/srv/target"),
            same_machine=False,
            tell=tell,
            say=lambda line: None,
        )
        self.events: list[str] = []

    async def _prepare_forks(self) -> None:
        pass

    async def _keep(self, rank: int, port: int, layers: tuple[int, int]) -> None:
        self.events.append(f"start {rank}")
        self._write(rank)
        self._report(rank, ReadyReport(rank, layers, "float32", "", 0.0, "", 1, "cpu"))
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append(f"stop {rank}")


CLUSTER = """
[cluster]
insecure = true
[target]
path = "/srv/target"
[[node]]
rank = 0
host = "10.0.0.1"
port = 7700
[[node]]
rank = 1
host = "10.0.0.2"
port = 7701
layers = [0, 1]
[[node]]
rank = 2
host = "10.0.0.3"
port = 7702
layers = [1, 2]
"""


@pytest.mark.asyncio
async def test_a_machine_says_when_it_is_prepared_and_again_when_it_has_been_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = asyncio.Event()

    class Forking:
        def __init__(self, *arguments: object) -> None: ...

        async def prepare(self, log: Path) -> None: ...

        async def imported(self, log: Path) -> None:
            await imported.wait()

        async def close(self) -> None: ...

    monkeypatch.setattr(stages_module, "ForkServerClient", Forking)
    channel = Channel(Admitted("", ""))
    machine = agent(tmp_path, channel)
    await machine._stages.follow(Orders(CLUSTER, (), (), 0))
    await asyncio.sleep(0)
    assert not channel.sent
    imported.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert channel.sent == [Prepared()]
    again = Channel(Admitted("", ""))
    await machine._serve(again)  # type: ignore[arg-type]
    assert again.sent == [Prepared()]
    await machine._stages.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("gone", [True, False])
async def test_what_is_loaded_on_suspicion_reaches_nobody_until_it_is_needed(
    tmp_path: Path, gone: bool
) -> None:
    channel = Channel()
    stages = Loaded(tmp_path, channel)

    def nodes() -> dict[int, tuple[str, int]]:
        return {node.rank: (node.host, node.port) for node in load(tmp_path / "rank-1.toml").node}

    await stages.follow(Orders(CLUSTER, (), (), 0, standby=(1,), standby_ports=(0,)))
    await asyncio.sleep(0)  # it starts
    await asyncio.sleep(0)  # its report
    assert channel.sent == [Serving(0, 1)]  # of no orders: it does not count
    assert [nodes()[rank] for rank in (0, 2)] == [("127.1.1.0", 1), ("127.1.1.2", 1)]
    await stages.follow(Orders(CLUSTER, (1,), (0,), 7) if gone else Orders(CLUSTER, (), (), 0))
    if gone:
        assert channel.sent[1:] == [Serving(7, 1)]
        assert stages.events == ["start 1"]
        assert nodes()[2] == ("10.0.0.3", 7702)
    await stages.stop_all()
    assert stages.events == ["start 1", "stop 1"]
    stages.listening.close()
