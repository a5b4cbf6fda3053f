"""The HTTP service over a toy cluster, in one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

import structlog

from actor.local_cluster import QUICK, LocalCluster, hello
from asyncspec.actor.routing import Host
from asyncspec.backend.sampling import draw
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.core.sampling import Sampling, seen
from asyncspec.plugins.toy.model import ToyModel
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.http.access import AllowedOrigins, ServiceOptions
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.node.host import LocalEngine, NodeHost, WorkerThread
from asyncspec_nodes.node.inspector import Inspector
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_nodes.serving.service import TextService
from asyncspec_nodes.serving.totals import Totals
from asyncspec_protocol.messages import Status, Submit
from nodes.toy_tokenizers import Pieces

# Words, and characters that take two tokens.
PIECES: tuple[bytes, ...] = (b"<end>", b" a", b"b", b"\xc3", b"\xa9", b"\n", b" the", b".")
PIECES += (b"\xe4\xb8", b"\x96", b" x", b"y", b'"', b"\\", b" \xf0\x9f", b"\x99\x82")
END = 0
ENDLESS = 100_000
"""More tokens than a test waits for."""


class ToyTokenizer(Pieces):
    """A tokenizer for the toy model."""

    def __init__(self) -> None:
        super().__init__(PIECES)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(1 + ord(c) % 15 for c in text)

    def render(self, chat: str) -> tuple[int, ...]:
        whole = json.loads(chat)
        messages = whole if isinstance(whole, list) else whole["messages"]
        if messages[0]["role"] == "assistant":
            raise ValueError("the chat template refuses these messages: the user speaks first")
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def spell(self, token: int) -> bytes:
        return PIECES[token]


CODEC = ToyTokenizer()
GRAMMARS = Grammars(lambda: Vocabulary(PIECES, {END}, (END,)))
RULES = ServingConfig(
    context_length=2 * ENDLESS,
    eos=frozenset({END}),
    policy="flowspec",
    vocab=16,
    grammars=GRAMMARS,
    layers=4,
)
MODEL = ToyModel(attention="parent")


class ServingCluster(LocalCluster):
    """A toy cluster whose draft node is a text service."""

    def __init__(self, stages: int, rules: ServingConfig, tokenizer: ToyTokenizer = CODEC) -> None:
        super().__init__(stages, MODEL)
        self._rules, self._tokenizer = rules, tokenizer
        self._host = NodeHost(structlog.wrap_logger(structlog.ReturnLogger()))
        self._totals = Totals(time.monotonic)
        self.inspectors: dict[int, Inspector] = {}

    def shell(self, rank: int) -> Host:
        return super().shell(rank) if rank else self._host

    def start(self, rank: int) -> None:
        super().start(rank)
        if rank == self.stages:
            self.backends[rank].constrain(GRAMMARS)
        self.inspectors[rank] = Inspector(
            self.nodes[rank],
            hello(rank, self.stages),
            model="toy",
            serving=None if rank else self._rules,
            totals=None if rank else self._totals,
        )
        if rank == 0:
            feed, worker = self.nodes[rank].feed, WorkerThread("reading")
            self._host.service = TextService(
                self._tokenizer, self._rules, feed, worker, max_requests=8, totals=self._totals
            )

    @property
    def engine(self) -> LocalEngine:
        assert self._host.service is not None
        return LocalEngine(self._host.service, self.inspectors[0])


class Toy:
    """``async with Toy() as toy``: ``toy.url`` serves the model "toy"."""

    def __init__(
        self,
        over: Literal["node", "link"] = "node",
        *,
        stages: int = 2,
        rules: ServingConfig = RULES,
        tokenizer: ToyTokenizer = CODEC,
        keys: tuple[str, ...] | ApiKeys = (),
        share_prefixes: bool = False,
        origins: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
        **limits: Any,
    ) -> None:
        self.cluster = ServingCluster(stages, rules, tokenizer)
        self._over = over
        self._options = ServiceOptions(
            ApiKeys(keys, share_prefixes=share_prefixes) if isinstance(keys, tuple) else keys,
            origins=AllowedOrigins(origins),
            limits=Limits(**limits),
        )
        self._tls = tls
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Toy:
        await self._stack.enter_async_context(self.cluster)
        if self._over == "node":
            self.engine: LocalEngine | ReconnectingEngine = self.cluster.engine
        else:
            host, port = self.cluster.ports[0]  # type: ignore[index]
            connect = partial(Client.connect, host, port, "toy", options=QUICK)
            self.engine = await self._stack.enter_async_context(ReconnectingEngine(connect))
        self.service = Service(self._options, str, structlog.wrap_logger(structlog.ReturnLogger()))
        self.service.serve(self.engine, "toy")
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # soon full
        sock.setblocking(False)
        self.server = await self._stack.enter_async_context(
            HttpServer(self.service, sock, self._tls)
        )
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._stack.aclose()

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"{self.server.scheme}://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Every HTTP connection, without a word."""
        assert self.server._runner.server is not None
        for connection in self.server._runner.server.connections:
            assert connection.transport is not None
            connection.transport.abort()

    async def settled(self) -> tuple[Status, ...]:
        """The nodes, once they have no session any more. A test's time-out is the bound."""
        while True:
            await asyncio.sleep(0)  # a node without links answers at once
            nodes = await self.engine.nodes()
            if not any(node.sessions or node.waiting or node.slots for node in nodes):
                return nodes

    async def busy(self) -> None:
        """Until every stage has a session."""
        while True:
            await asyncio.sleep(0)
            nodes = await self.engine.nodes()
            if len(nodes) > self.cluster.stages and all(node.sessions for node in nodes):
                return


def reference(submit: Submit) -> tuple[tuple[int, ...], str]:
    """What the toy model alone makes of a request: tokens, and their text."""
    prompt = submit.prompt_ids or CODEC.encode(submit.prompt)
    if submit.chat:
        prompt = CODEC.render(submit.chat)
    sampling = Sampling.of(submit)
    tokens: list[int] = []
    state = MODEL.read(prompt)
    while len(tokens) < submit.max_new_tokens:
        path = (*prompt, *tokens)
        before = seen(path, len(prompt))
        (token,) = draw(MODEL.logits([state.hidden]), [len(path)], sampling, path_counts=[before])
        tokens.append(token)
        if token == END and not submit.ignore_eos:
            break
        state = MODEL.extend(state, token)
    return tuple(tokens), CODEC.decode(tokens)
