"""Connections of hostile peers, each made from the seed and its number alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import FrameReader, decode
from asyncspec_protocol.ids import MAX_DRAFTS, Rank, draft_rank, first_session
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Hello, Message, Segment, Submit, Welcome
from tools.fuzz_wire.bed import READ, SOURCE, STAGES, Bed
from tools.fuzz_wire.mutations import damaged, frame_of, passable, restructured
from tools.fuzz_wire.traffic import Drafter, Pipeline, from_client, hidden_states

LONGEST = 80
"""Frames of a connection at most."""

KEPT = 64
"""Connections whose frames are kept for the report."""


class Connection(Struct):
    """What was written on one connection to a rank."""

    rank: int
    frames: list[bytes] = []
    # Which of them are no valid frames of this moment.
    mutated: list[bool] = []


class Attack:
    """Of one role. ``number`` counts connections."""

    def __init__(self, bed: Bed, role: str, seed: int) -> None:
        self._bed = bed
        self._role = role
        self._seed = seed
        self._number = 0
        self._pool: deque[bytes] = deque(maxlen=512)
        # Draft nodes' numbers that are in use.
        self._drafts: set[int] = {0}
        # Mutated frames that a node has read, and all.
        self.mutated = 0
        self.frames = 0
        self.recent: deque[Connection] = deque(maxlen=KEPT)

    async def run(self, most: int) -> None:
        """Until ``most`` mutated frames were read."""
        while self.mutated < most:
            self._number += 1
            await self._connection(random.Random(f"{self._seed}/{self._role}/{self._number}"))

    async def _connection(self, rng: random.Random) -> None:
        # A later stage reads little of a draft node.
        ranks = {"verify": (1,) * 9 + (STAGES,), "source": (SOURCE,), "draft": (0,)}[self._role]
        rank, draft = rng.choice(ranks), rng.randrange(1, MAX_DRAFTS)
        while draft in self._drafts:
            draft = rng.randrange(1, MAX_DRAFTS)
        self._drafts.add(draft)
        made = Connection(rank)
        self.recent.append(made)
        drafter = Drafter(rng, first_session(draft_rank(draft)), lambda: self._bed.live_session)
        try:
            frames = self._frames(rng, made, draft, drafter)
            port, read = await send_or_find(self._bed, rank, frames, rng, drafter.received)
        finally:
            self._drafts.discard(draft)
        self.frames += read
        self.mutated += sum(made.mutated[:read])
        READ.pop(port, None)
        self._bed.check()

    def _frames(
        self, rng: random.Random, made: Connection, draft: int, drafter: Drafter
    ) -> Iterator[bytes]:
        hello = client_hello("fuzzed")
        if made.rank:
            hello = replace(self._bed.hellos[0], rank=draft_rank(draft))
        yield self._made(rng, made, frame_of(hello), 0.02)
        for _ in range(rng.choice((3, 10, 30, LONGEST, LONGEST))):
            kind = rng.random()
            if kind < 0.02:
                yield self._keep(made, rng.choice(self._pool))
            elif kind < 0.04:  # too late by one
                late = self._next_frame(rng, made.rank, drafter)
                yield self._keep(made, self._next_frame(rng, made.rank, drafter))
                yield self._keep(made, late)
            else:
                frame = self._next_frame(rng, made.rank, drafter)
                yield self._made(rng, made, frame, 0.4)
                if kind > 0.98:
                    yield self._keep(made, frame)

    def _next_frame(self, rng: random.Random, rank: int, drafter: Drafter) -> bytes:
        if not rank:
            return frame_of(from_client(rng))
        if rank == SOURCE:
            message = drafter.to_source()
        else:
            message = drafter.to_stage() if rank == 1 else drafter.to_later_stage()
        if isinstance(message, Segment) and rng.random() < 0.02:
            return frame_of(message, *hidden_states(rng, message))
        return frame_of(message)

    def _keep(self, made: Connection, frame: bytes) -> bytes:
        """A valid frame at another moment."""
        made.frames.append(frame)
        made.mutated.append(True)
        return frame

    def _made(self, rng: random.Random, made: Connection, frame: bytes, share: float) -> bytes:
        """A frame, of which ``share`` are mutated: most keep a frame's form, and some do not."""
        self._pool.append(frame)
        mutated = rng.random() < share
        if mutated:
            frame = (passable if rng.random() < 0.97 else damaged)(rng, frame)
        made.frames.append(frame)
        made.mutated.append(mutated)
        return frame


async def send_or_find(
    bed: Bed,
    rank: int,
    frames: Iterable[bytes],
    rng: random.Random,
    received: Callable[[Message], None] = lambda message: None,
) -> tuple[int, int]:
    """``send`` to a rank. Raises ``Found`` where its node has ended."""
    try:
        return await send(bed.ports[rank], frames, rng, received)
    except ConnectionRefusedError:  # it ends
        await asyncio.sleep(5.0)
        bed.check()
        raise


async def send(
    port: int,
    frames: Iterable[bytes],
    rng: random.Random,
    received: Callable[[Message], None] = lambda message: None,
) -> tuple[int, int]:
    """Write frames to a node until it closes; the own port, and how many it has read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    own: int = writer.get_extra_info("sockname")[1]
    reading = asyncio.create_task(_read(reader, received))
    try:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop: the transport is closed
            for frame in frames:
                if reading.done():
                    break
                split = rng.randrange(len(frame) + 1) if rng.random() < 0.05 and frame else 0
                if split:
                    writer.write(frame[:split])
                    await asyncio.sleep(0)
                writer.write(frame[split:])
                if rng.random() < 0.3:
                    await writer.drain()
                    await asyncio.sleep(0)
            await writer.drain()
            if rng.random() < 0.1:
                writer.transport.abort()
            elif not reading.done():
                writer.write_eof()
        await reading
    finally:
        reading.cancel()
        writer.transport.abort()
        await asyncio.sleep(0)
    for _ in range(100):
        if own in READ:
            break
        await asyncio.sleep(0.001)
    return own, READ[own]


async def _read(reader: asyncio.StreamReader, received: Callable[[Message], None]) -> None:
    """What a node says, to the end."""
    frames = FrameReader()
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            while data:
                buffer = frames.get_buffer()
                count = min(len(buffer), len(data))
                buffer[:count], data = data[:count], data[count:]
                frames.buffer_updated(count)
                while (frame := frames.next_frame()) is not None:
                    received(frame.message)


class HostilePipeline:
    """Stages and a token source of a draft node that they do not wish well."""

    def __init__(self, bed: Bed, seed: int) -> None:
        self._bed = bed
        self._rng = random.Random(f"{seed}/pipeline")
        self._pipeline = Pipeline(self._rng)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._servers: list[asyncio.Server] = []
        self.frames = 0
        self.requests = 0

    async def run(self) -> None:
        """Until cancelled."""
        ports = {}
        for rank in range(1, SOURCE + 1):
            server = await asyncio.start_server(self._serve(rank), "127.0.0.1", 0)
            self._servers.append(server)
            ports[rank] = server.sockets[0].getsockname()[1]
        engine = self._bed.add_victim(ports)
        try:
            while True:
                submit = Submit(0, "hello", 30, 1, 0.0, 0, 1.0, ignore_eos=True)
                await asyncio.sleep(0.01)  # the node's task begins
                async for _ in engine.ask(submit):
                    pass
                self.requests += 1
        finally:
            for server in self._servers:
                server.close()
            for writer in self._writers.values():
                writer.transport.abort()

    def _serve(
        self, rank: int
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], asyncio.Task[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends = (OSError, RuntimeError, asyncio.IncompleteReadError, RemoteProtocolError)
            with contextlib.suppress(*ends):
                await self._talk(rank, reader, writer)
            writer.close()

        return lambda reader, writer: asyncio.ensure_future(serve(reader, writer))

    async def _talk(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rng, pipeline = self._rng, self._pipeline
        while True:
            lengths = await reader.readexactly(8)
            header = await reader.readexactly(int.from_bytes(lengths[:4], "big"))
            await reader.readexactly(int.from_bytes(lengths[4:], "big"))
            message = decode(header).message
            if isinstance(message, Hello):
                welcome = replace(self._bed.hellos[rank], rank=Rank(rank))
                self._writers[rank] = writer
                writer.write(frame_of(Welcome(**asdict(welcome))))
                answers = list(pipeline.greeting(rank))
            else:
                answers = list(pipeline.answers(rank, message))
            for answer in answers:
                to = self._writers.get(answer.rank)
                if to is not None:
                    to.write(self._perhaps(answer.frame))
            if rng.random() < 0.2:
                writer.write(self._perhaps(pipeline.unasked(rank)))

    def _perhaps(self, frame: bytes) -> bytes:
        self.frames += 1
        if self._rng.random() < 0.1:
            mutate = restructured if self._rng.random() < 0.8 else damaged
            return mutate(self._rng, frame)
        return frame
