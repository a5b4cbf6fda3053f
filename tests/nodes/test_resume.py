"""An answer goes on behind a draft node that was lost, as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actor.local_cluster import QUICK, bound, hello
from asyncspec.actor.inbox import Event
from asyncspec.core.errors import ClusterError
from asyncspec.core.machine import Emit, Finish, Request, Stopped, Submitted
from asyncspec.core.stats import MAX_BREAKS, SUSPECT_BREAKS
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import Progress, ReconnectingEngine
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_nodes.serving.service import TextService
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.framing import FrameReader, write_frame
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Finished, Hello, Message, Output, Submit, Welcome
from asyncspec_protocol.sampling import Constraint
from cluster import Cluster
from effort import examples
from laws import check_after, clusters, requests, watch_invariants
from nodes.manual_thread import ManualThread
from nodes.test_service import ASK, RULES, Inbox, World
from nodes.toy_tokenizers import CODECS
from tools.bench.limits.codec import feed
from toy_service import Toy, reference


@settings(max_examples=examples(300, quick=60))
@given(
    clusters(),
    requests(3),
    st.integers(0, 12),
    st.integers(0, 9),
    st.lists(st.integers(0, 14), min_size=3, max_size=3),
)
def test_tokens_go_on_from_any_beginning(
    cluster: Cluster, asked: list[Request], emitted: int, later: int, known: list[int]
) -> None:
    """The draft node is restarted some time after so many tokens, and asked again with what users
    have: it may have emitted more. Sampling, penalties and grammars are as in one go."""
    watch_invariants(cluster)
    world, begun = cluster.world, {request.request: request for request in asked}

    def wait() -> None:
        if len(world.finished) < len(asked):
            enough = sum(map(len, world.tokens.values())) >= emitted
            world.at(world.now + 1 + enough * later, restart if enough else wait)

    def restart() -> None:
        world.restart(DRAFT, cluster.draft())
        cluster.connect_all()
        for request, most in zip(asked, known, strict=False):
            if request.request not in world.finished:
                # The text service ends a request whose answer the user has.
                most = min(most, len(cluster.expected(request)) - 1)
                reported = tuple(world.tokens.get(request.request, ()))[:most]
                world.tokens[request.request] = list(reported)
                begun[request.request] = replace(request, given=reported)
                cluster.submit(begun[request.request])

    for request in asked:
        cluster.submit(request)
    wait()
    world.run(until=200_000.0)
    check_after(cluster, [*begun.values()])


class Told(Inbox):
    """A client that puts its answer together."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for one in self.got if isinstance(one, Output) for t in one.token_ids)

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.got if isinstance(one, Output))


class Serving:
    """A text service with a machine that emits ``answer`` in groups of any size."""

    def __init__(self, codec: object, vocab: int) -> None:
        rules = ServingConfig(10_000, frozenset(), "flowspec", vocab=vocab)
        self._fed: list[object] = []
        self._service = TextService(
            codec,  # type: ignore[arg-type]
            rules,
            self._fed.append,
            ManualThread(),
            max_requests=2,
        )

    def answer(
        self, submit: Submit, answer: Sequence[int], sizes: Sequence[int], reported: Told
    ) -> None:
        """As many tokens as there are sizes for; the end too if these are all."""
        self._service.client(reported, submit)
        if isinstance(reported.got[-1] if reported.got else None, Finished):
            return
        (submitted,) = self._fed
        assert isinstance(submitted, Submitted)
        number, done = submitted.request.request, len(submitted.request.given)
        for size in sizes:
            self._service.emit(Emit(number, tuple(answer[done : done + size])))
            done += size
            stopped = [event for event in self._fed if isinstance(event, Stopped)]
            if stopped or done >= len(answer):
                self._service.finish(Finish(number, "length", stats={"new_tokens": done}))
                return


@settings(max_examples=examples(400, quick=100))
@given(
    st.sampled_from(sorted(CODECS)),
    st.data(),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_text_goes_on_from_any_beginning(name: str, data: st.DataObject, sizes: list[int]) -> None:
    codec = CODECS[name]
    vocab = codec.tokenizer.get_vocab_size()
    answer = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20))
    text = codec.decode(answer)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = data.draw(st.sampled_from([(), (text[start : start + 2],)])) if text else ()
    submit = Submit(
        *(7, "", len(answer), 0, 0.0, 0, 1.0), prompt_ids=(1, 2), stop=tuple(filter(None, stops))
    )
    whole, parts = Told(), Told()
    Serving(codec, vocab).answer(submit, answer, [1] * len(answer), whole)
    Serving(codec, vocab).answer(submit, answer, sizes, parts)
    if not (parts.got and isinstance(parts.got[-1], Finished)) or data.draw(st.booleans()):
        parts.got = [one for one in parts.got if isinstance(one, Output)]
        again = replace(submit, given=parts.tokens, given_text=len(parts.text))
        Serving(codec, vocab).answer(again, answer, [3] * len(answer), parts)
    assert (parts.tokens, parts.text) == (whole.tokens, whole.text)
    ends = [one for one in (parts.got[-1], whole.got[-1]) if isinstance(one, Finished)]
    assert ends[0].reason == ends[1].reason


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"given": (1,) * 6}, "6 tokens are given, but the answer has at most 5"),
        (
            {"given": (1,) * 8, "max_new_tokens": 100},  # the context has room for seven
            "8 tokens are given, but the answer has at most 7",
        ),
        ({"given": (200,)}, "a token that is given is not in the vocabulary of 200"),
        ({"given": (0, 1)}, "the tokens that are given go on behind the answer's end"),
    ],
)
def test_beginnings_that_are_none(changes: dict[str, tuple[int, ...]], reported: str) -> None:
    world = World(RULES)
    world.ask(replace(ASK, **changes))
    assert world.inbox.got == [Finished(7, "error", reported, {}, "given_token_ids")]


PLAIN = Submit(0, "hello", 100, 5, 0.8, 0, 0.95, ignore_eos=True, repetition_penalty=1.2)
LETTERS = Constraint(r"start: /( a|b| the|\.){40,60}/")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "submit",
    [PLAIN, replace(PLAIN, ignore_eos=False, constraint=LETTERS)],
    ids=["plain", "grammar"],
)
async def test_a_client_gets_the_same_text_from_two_draft_nodes(submit: Submit) -> None:
    tokens: list[int] = []
    text = ""
    async with Toy("link") as toy:
        async for event in toy.engine.ask(submit):
            if isinstance(event, Finished):
                break
            assert isinstance(event, Output)
            if not tokens:
                await toy.cluster.stop(0)
                toy.cluster.start(0)
            tokens += event.token_ids
            text += event.text
        assert event.reason in ("stop", "length")
        assert event.stats["new_tokens"] == len(tokens)
        await toy.settled()
        whole = [one async for one in toy.engine.ask(submit) if isinstance(one, Output)]
    if not submit.constraint.grammar:
        assert (tuple(tokens), text) == reference(submit)
    assert tuple(tokens) == tuple(token for one in whole for token in one.token_ids)
    assert text == "".join(one.text for one in whole)


async def finished(answer: AsyncIterator[Event]) -> Event:
    """The last event."""
    async for event in answer:
        last = event
    return last


@pytest.mark.asyncio
async def test_another_target_does_not_go_on() -> None:
    async with Toy("link") as toy:
        answer = toy.engine.ask(PLAIN)
        await anext(answer)
        await toy.cluster.stop(0)
        toy.cluster.changes[0] = {"fingerprint": "other"}
        toy.cluster.start(0)
        with pytest.raises(ClusterError, match="back with another target"):
            await finished(answer)


class Dying(asyncio.Protocol):
    """A draft node that a request ends."""

    def __init__(self, asked: list[Submit]) -> None:
        self._asked = asked
        self._submitted = 0
        self._reader = FrameReader()
        self.facts = {name: getattr(hello(0, 1), name) for name in Welcome.__struct_fields__}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in feed(self._reader, data):
            message: Message = frame.message
            if isinstance(message, Hello):
                self._transport.writelines(write_frame(Welcome(**self.facts)))
            elif isinstance(message, Submit):
                self._asked.append(message)
                self.submitted()

    def submitted(self) -> None:
        self._transport.abort()


@pytest.mark.asyncio
async def test_a_request_that_ends_draft_nodes_is_not_asked_again() -> None:
    asked: list[Submit] = []
    sock = bound()
    loop = asyncio.get_running_loop()
    host, port = sock.getsockname()
    connect = partial(Client.connect, host, port, "toy", options=QUICK)
    async with (
        await loop.create_server(lambda: Dying(asked), sock=sock),
        ReconnectingEngine(connect) as engine,
    ):
        (end,) = [event async for event in engine.ask(PLAIN)]
    assert isinstance(end, Finished)
    assert (end.code, len(asked)) == (BREAKS, MAX_BREAKS)
    assert "the draft node was lost 2 times in a row" in end.detail


@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_is_held_against_what_had_brought_nothing_or_was_alone(alone: bool) -> None:
    progress = Progress(PLAIN, ())
    progress.add(Output(0, (1,), "a"))
    progress.lost(alone=alone)
    assert progress.losses == int(alone)
    progress.lost(alone=alone)
    assert progress.losses == 1 + int(alone)
    progress.add(Output(0, (1,), "a"))
    assert progress.losses == 0


@pytest.mark.asyncio
async def test_a_draft_node_that_does_not_come_back() -> None:
    async with Toy("link") as toy:
        host, port = toy.cluster.ports[DRAFT]
        connect = partial(Client.connect, host, port, "toy", options=QUICK)
        async with ReconnectingEngine(connect, resume_seconds=0.2) as engine:
            answer = engine.ask(PLAIN)
            await anext(answer)
            await toy.cluster.stop(0)
            with pytest.raises(ClusterError, match=r"; it was not back within 0\.2 s"):
                await finished(answer)


@pytest.mark.asyncio
@pytest.mark.parametrize("waits", [True, False])
async def test_closing_ends_the_answers_that_are_read(waits: bool) -> None:
    """And those that wait for a lost draft node, at once."""
    async with Toy("link") as toy:
        host, port = toy.cluster.ports[DRAFT]
        connect = partial(Client.connect, host, port, "toy", options=QUICK)
        async with ReconnectingEngine(connect, waits=waits) as engine:
            read, waiting = (engine.ask(replace(PLAIN, max_new_tokens=9000)) for _ in range(2))
            await anext(read)
            await anext(waiting)
            rest = asyncio.create_task(finished(read))
        for answer in (rest, finished(waiting), finished(engine.ask(PLAIN)), engine.nodes()):
            with pytest.raises(ClusterError, match="this client of the draft node is closed"):
                await asyncio.wait_for(answer, 30)


class Fickle(Dying):
    """A draft node that two requests end, then one, and that comes back with another target."""

    def __init__(self, asked: list[Submit], connections: list[int]) -> None:
        super().__init__(asked)
        connections.append(len(connections))
        self._number = connections[-1]
        if self._number > SUSPECT_BREAKS:
            self.facts["fingerprint"] = "other"

    def submitted(self) -> None:
        self._submitted += 1
        if self._submitted == 2 or self._number >= SUSPECT_BREAKS:
            self._transport.abort()


@pytest.mark.asyncio
async def test_a_suspect_that_has_waited_does_not_go_on_with_another_target() -> None:
    """Two suspects: the second waits while the first ends the draft node once more."""
    asked: list[Submit] = []
    connections: list[int] = []
    sock = bound()
    host, port = sock.getsockname()
    connect = partial(Client.connect, host, port, "toy", options=QUICK)
    async with (
        await asyncio.get_running_loop().create_server(
            lambda: Fickle(asked, connections), sock=sock
        ),
        ReconnectingEngine(connect) as engine,
    ):
        ends = await asyncio.gather(
            *(finished(engine.ask(PLAIN)) for _ in range(2)), return_exceptions=True
        )
    assert len(asked) == 2 * SUSPECT_BREAKS + 1
    assert "back with another target" in str(ends[1])
