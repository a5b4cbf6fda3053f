"""The machine that a cluster is started on: it admits members, has layers placed on them, and runs
the draft node."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec.placement.model import TargetCost
from asyncspec_nodes.cluster.config import Config, SecurityTable
from asyncspec_nodes.console.bounds import GB, GIB
from asyncspec_nodes.local.cluster import FILE
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import ReadyReport, Report
from asyncspec_nodes.plugins.join.agent import AgentOptions
from asyncspec_nodes.plugins.join.authority import CA, CERTIFICATE, KEY
from asyncspec_nodes.plugins.join.cluster_file import ClusterFile
from asyncspec_nodes.plugins.join.formation import Formation, FormationOptions, answer_before
from asyncspec_nodes.plugins.join.links import Links
from asyncspec_nodes.plugins.join.members import Member, Members, watch_end, watch_presence
from asyncspec_nodes.plugins.join.messages import (
    Alive,
    Ended,
    Failed,
    FromMember,
    Leaving,
    Measured,
    Offer,
    Prepared,
    Reaches,
    Refused,
    Serving,
    Step,
    ToMember,
)
from asyncspec_nodes.plugins.join.own_machine import OwnMachine, run_draft
from asyncspec_nodes.plugins.join.server import JoinServer
from asyncspec_nodes.plugins.join.token import Token, TokenFile
from asyncspec_protocol.clients import Status
from asyncspec_protocol.ids import DRAFT

IDLE_SECONDS = 5.0
"""Without requests, before layers move only because that is faster."""

LOAD_SECONDS = 600.0
"""For all stages and the draft node to load."""


class CoordinatorOptions(FormationOptions, frozen=True):
    """What a user says of the cluster."""

    name: str
    # Where members are awaited, stages here on the ports after it; and what members are told
    # instead, an empty host: all addresses of this machine, port 0: the same.
    listen: tuple[str, int] = ("0.0.0.0", 0)
    advertise: tuple[str, int] = ("", 0)
    # Keeps the token from one run to the next; None: it ends with this one.
    token_file: Path | None = None
    new_token: bool = False
    # Whether this machine holds a stage; its memory and speed, None: measured.
    holds: bool = True
    memory: int | None = None
    speed: float | None = None
    # Bytes of the draft node, which this machine runs besides.
    draft_bytes: int = 0


class Coordinator:
    """``async with``: inside, every stage serves. ``config``: of the cluster, with the draft node
    alone; ``target``: what stages of its target take; ``show`` receives the token's line once
    others can join, ``say`` a line for each event."""

    def __init__(
        self,
        config: Config,
        target: TargetCost,
        options: CoordinatorOptions,
        show: Callable[[Token], None],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._show = show
        self.say = say
        self._stack = AsyncExitStack()
        self._folder = Path()
        self._config = replace(config, security=SecurityTable(CA, CERTIFICATE, KEY))
        self.members = Members(
            *(self._config, target, config.limits.sessions, options.stages, options.advertise[0]),
            warm=options.warm,
        )
        self._formation = Formation(
            self.members, target, options, config.limits.rejoin_seconds, say
        )
        self._links = Links(self.members, options.listen, options.advertise, say)
        self._changed = asyncio.Event()
        self._steps: dict[int, str] = {}
        # The draft node has loaded once; and everything.
        self._drafts = False
        self._guarding = self._ends = False
        self._over: asyncio.Future[AsyncSpecError] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._own: OwnMachine | None = None
        self._server: JoinServer | None = None
        self._draft: asyncio.Task[None] | None = None
        self._draft_socket: socket.socket | None = None
        # Says whether nobody asks anything now; None: it is not known, and layers stay.
        self.is_idle: Callable[[], Awaitable[bool]] | None = None
        self._idle_since: float | None = None
        self._written = ClusterFile(lambda: self.file, self._current, say)

    @property
    def address(self) -> tuple[str, int]:
        """The draft node's."""
        node = self._config.at(DRAFT)
        return node.host, node.port

    @property
    def security(self) -> SecurityTable:
        """For clients on this machine."""
        paths = (str(self._folder / name) for name in (CA, CERTIFICATE, KEY))
        return SecurityTable(*paths)

    @property
    def file(self) -> Path:
        """The cluster file, for clients on this machine."""
        return self._folder / FILE

    def pressed(self) -> None:
        """A user has pressed Enter: it waits for further machines, or starts with these."""
        self._formation.pressed()
        self._changed.set()

    def pending(self) -> str:
        """What has to happen before requests are served."""
        if not self.members.assignment:
            return self._formation.pending()
        loading = [
            f"stage {rank} ({self._steps.get(rank, 'starting')})"
            for rank in range(1, len(self.members.assignment) + 1)
            if rank not in self.members.serving
        ]
        return ", ".join(loading if self._drafts else [*loading, "draft node"])

    async def __aenter__(self) -> Coordinator:
        try:
            await self._open()
            await self._formation.place(self._change)
            await self._load()
        except BaseException:
            await self.__aexit__()
            raise
        self._start(self._guard())
        self._guarding = True
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ends = True
        for member in self.members.by_id.values():
            member.send(Ended())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def watch(self) -> AsyncSpecError:
        """Wait for what ends the cluster; the error to report."""
        return await asyncio.shield(self._over)

    def watch_links(self, nodes: Callable[[], Awaitable[Sequence[Status]]]) -> asyncio.Task[None]:
        """Carry links that stay down from now on; ``nodes`` asks the draft node."""
        return self._start(self._links.watch(nodes))

    # --- Members.

    async def _open(self) -> None:
        """Admit members from now on, this machine among them."""
        options, stack = self._options, self._stack
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncspec-"))
        self._folder = Path(folder)
        where = (self._config.target.path, options.listen, options.advertise)
        stored = TokenFile(options.token_file, self.say, new=options.new_token)
        stack.enter_context(stored)
        stack.push_async_callback(self._links.close)
        server = JoinServer(self._folder, options.name, *where, stored, self)
        self._server = server
        self._formation.expected = server.machines
        token = await stack.enter_async_context(server)
        self._show(token)
        self._start(watch_presence(self.members, self._changed.set))
        if options.holds:
            self._start(self._hold(server.here(token)))

    async def _hold(self, token: Token) -> None:
        """This machine as a member."""
        options = self._options
        host, first = options.advertise
        how = AgentOptions(
            f"{options.name} (here)",
            advertise=(host, first and first + 1),
            memory=options.memory,
            speed=options.speed,
            same_machine=True,
            reserved=options.draft_bytes,
        )
        self._own = OwnMachine(token, how, options.listen, self._folder / "stage")
        await self._own.run()

    def admit(self, offer: Offer, seen: str, send: Callable[[ToMember], None]) -> Member:
        members, before = self.members, self.members.config()
        if members.admit(offer, seen, send):
            self._formation.joined_at = time.monotonic()
            spare = " as a spare" if members.assignment and not members.incomplete else ""
            self.say(
                f"{members.name(offer.member)} has joined{spare}: {offer.memory / GIB:.1f} GiB, "
                f"{offer.speed / GB:.3g} GB/s"
            )
        if members.config() == before:
            members.tell(offer.member)
        else:  # others dial it at another address
            members.tell_all()
            self._written.changed()
            self._written.refresh()
        self._changed.set()
        return members.by_id[offer.member]

    def lost(self, member: Member) -> None:
        if self.members.by_id.get(member.offer.member) is member:
            member.presence.disconnected()
            if self._ends:  # as it has told them all
                return
            self.say(f"{self.members.name(member.offer.member)} has no connection any more")
            self._changed.set()
            self._start(watch_end(self.members, member, self._changed.set))

    def received(self, name: str, message: FromMember) -> bool:
        members = self.members
        if name not in members.by_id:  # it has been told so
            return True
        members.by_id[name].presence.received()
        if isinstance(message, Alive):
            return True
        match message:
            case Step(version, rank, text) if members.is_current(name, rank, version):
                self._steps[rank] = text
            case Serving(version, rank) if members.is_current(name, rank, version):
                members.serving.add(rank)
            case Failed(version, rank, text, user) if members.is_current(name, rank, version):
                member, called = members.by_id[name], members.name(name)
                if user and not self._guarding:
                    self._end(UserError(f"{called}: {text}"))
                self.say(f"{called}: {text}")
                member.send(Refused(f"its stage has failed: {text}", user))
                self._drop(name)
            case Prepared():
                members.by_id[name].prepared = True
            case Measured(speed):
                members.measured(name, speed)
                self.say(f"{members.name(name)} is faster than it was: {speed / GB:.3g} GB/s")
            case Reaches():
                self._links.reaches(name, message)
            case Leaving():
                self.say(f"{members.name(name)} has left")
                self._drop(name)
                return False
            case _:
                pass
        self._changed.set()
        return True

    def _drop(self, name: str) -> None:
        self.members.by_id.pop(name, None)
        self._changed.set()

    # --- The cluster.

    async def _load(self) -> None:
        """Start the draft node, and wait until all have loaded. Raises ``AsyncSpecError``."""
        sock = listen.loopback()
        sock.setblocking(False)
        self._stack.callback(sock.close)
        port = sock.getsockname()[1]
        node = replace(self._config.at(DRAFT), port=port)
        self._config = replace(self._config, node=(node,))
        self.members.set_draft(node)
        self.members.tell_all()
        self._written.write()
        self._draft_socket = sock
        self._draft = self._start(self._run_draft(sock))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                while not (self._drafts and self.members.ready) and not self._over.done():
                    await self._change(0.5)
                    await self._repair()
        except TimeoutError:
            raise ClusterError(f"{self.pending()} did not load in {LOAD_SECONDS:g} s") from None
        if self._over.done():
            raise self._over.result()

    def _current(self) -> Config:
        """What clients and the draft node, on this machine, are to know."""
        own = self._own
        return self.members.config(*(() if own is None else (own.member, own.here)))

    async def _run_draft(self, sock: socket.socket) -> None:
        def report(report: Report) -> None:
            self._drafts = self._drafts or isinstance(report, ReadyReport)
            self._changed.set()

        raise await run_draft(self.file, sock, report, self.say)

    async def _guard(self) -> None:
        """Repair whatever happens."""
        while True:
            was = self.members.ready
            await self._change(1.0)
            await self._repair()
            if self.members.ready and not was:
                self.say("all stages serve")
            if self.members.ready and self._server is not None:
                self._server.remember(len(self.members.by_id))
            await self._improve()

    async def _improve(self) -> None:
        """Plan anew for machines that have joined or are faster, while nobody asks: where another
        number of stages is better the draft node starts again, too."""
        now = time.monotonic()
        if not self._formation.may_improve or not await self._is_quiet():
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < IDLE_SECONDS:
            return
        plan = await self._formation.improve()
        if plan is None or not await self._is_quiet():
            return
        others = len(plan) != len(self.members.assignment)
        if others and self._draft is not None:
            self._draft.cancel()
            await asyncio.gather(self._draft, return_exceptions=True)
        self._formation.carry_out(plan)
        self._written.write()
        if others and self._draft_socket is not None:
            self._draft = self._start(self._run_draft(self._draft_socket))

    async def _is_quiet(self) -> bool:
        return self.is_idle is not None and await answer_before(self._changed, self.is_idle())

    async def _repair(self) -> None:
        if await self._formation.repair():
            self._written.changed()
        self._written.refresh()

    async def _change(self, seconds: float) -> None:
        """Wait for a change, at most so long. Raises what has ended the cluster."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        if self._over.done():
            raise self._over.result()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run until the cluster ends, which an exception of ``work`` does."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._finished)
        self._tasks.append(task)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """``watch`` returns what has failed, and raises a mistake of ours."""
        if self._over.done():
            pass
        elif isinstance(error, AsyncSpecError):
            self._over.set_result(error)
        else:
            self._over.set_exception(error)
        self._changed.set()
