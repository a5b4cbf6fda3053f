"""Strangers' connections make room for others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.places import GRACE_SECONDS, Places, network
from toy_service import ENDLESS, Toy

KEY = "sk-test"
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
AUTHORISED = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class Guest:
    keyed: bool = False
    at_work: bool = False
    unread: bool = False
    address: str = "192.0.2.1"
    dropped: list[bool] = field(default_factory=list)

    def drop(self) -> None:
        self.dropped.append(True)


guests = st.builds(Guest, st.booleans(), st.booleans(), st.booleans(), st.just(""))


@given(st.lists(guests, max_size=20), st.integers(1, 6), st.booleans())
def test_a_new_connection_finds_a_place_unless_all_are_at_work(
    coming: list[Guest], most: int, closed: bool
) -> None:
    places = Places(Limits(connections=most), closed=closed, clock=lambda: 0.0)
    held: list[Guest] = []
    for guest in coming:
        full = len(held) == most
        strangers = [one for one in held if not one.keyed and (closed or not one.at_work)]
        clients = [one for one in held if one.keyed and not one.at_work]
        leaves = [*strangers, *clients][:1] if full else []
        assert places.take(guest) == (not full or bool(leaves))
        assert all(one.dropped for one in leaves)
        held = [one for one in held if one not in leaves]
        held += [guest] if not full or leaves else []
        assert not any(one.dropped for one in held)
        assert len(places) == len(held) <= most


def test_an_address_has_a_bound_for_strangers() -> None:
    """Past the grace; keys and other addresses are not concerned."""
    now = [0.0]
    limits = Limits(strangers_per_address=2)
    places = Places(limits, clock=lambda: now[0])
    first = [Guest(), Guest(keyed=True), Guest(address="192.0.2.2"), Guest(), Guest()]
    for guest in first:
        assert places.take(guest)
        places.bound(guest.address)
    assert not any(guest.dropped for guest in first)
    now[0] = GRACE_SECONDS
    last = Guest()
    assert places.take(last)
    places.bound(last.address)
    assert [bool(guest.dropped) for guest in first] == [True, False, False, False, False]


@pytest.mark.parametrize("closed", [True, False])
def test_strangers_that_say_nothing_are_swept_where_there_are_keys(closed: bool) -> None:
    now = [0.0]
    places = Places(Limits(stranger_seconds=5), closed=closed, clock=lambda: now[0])
    staying = [Guest(keyed=True), Guest(at_work=True), Guest(unread=True)]
    idle = Guest()
    for guest in [*staying, idle]:
        places.take(guest)
    now[0] = 4.9
    places.sweep()
    assert not idle.dropped
    now[0] = 5.0
    places.sweep()
    assert bool(idle.dropped) == closed
    assert not any(guest.dropped for guest in staying)


def test_a_connection_that_has_left_is_not_kept() -> None:
    places, guest = Places(Limits(), clock=lambda: 0.0), Guest()
    places.take(guest)
    places.leave(guest)
    places.touch(guest)
    assert len(places) == 0


@pytest.mark.parametrize(
    ("address", "one"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_what_counts_as_one_address(address: str, one: str) -> None:
    assert network(address) == one


async def _asked(toy: Toy, stack: AsyncExitStack, request: bytes) -> Ends:
    ends = await asyncio.open_connection("127.0.0.1", toy.port)
    stack.callback(ends[1].close)
    ends[1].write(request)
    return ends


@pytest.mark.asyncio
@pytest.mark.parametrize("keys", [(), (KEY,)])
@pytest.mark.parametrize("sent", [ASK, b"", ASK[:20], ASK.replace(b"\r\n\r\n", b"\r\nA: b")])
async def test_strangers_do_not_hold_every_place(keys: tuple[str, ...], sent: bytes) -> None:
    """Idle after an answer, or with a request half sent."""
    async with Toy(keys=keys, connections=4) as toy, AsyncExitStack() as stack:
        client = await _asked(toy, stack, AUTHORISED.encode())
        assert (await client[0].readline()).startswith(b"HTTP/1.1 200 ")
        for _ in range(10):
            stranger = await _asked(toy, stack, sent)
            if sent == ASK:
                assert (await stranger[0].readline()).startswith(b"HTTP/1.1 200 ")
        late = await _asked(toy, stack, ASK)
        assert (await late[0].readline()).startswith(b"HTTP/1.1 200 ")
        if keys:  # a client keeps its place
            await client[0].readuntil(b'"data"')
            client[1].write(AUTHORISED.encode())
            await client[0].readuntil(b"HTTP/1.1 200 ")


@pytest.mark.asyncio
async def test_a_half_sent_body_makes_room() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    half = head + b"Content-Type: application/json\r\n\r\n{"
    async with Toy(connections=3) as toy, AsyncExitStack() as stack:
        slow = [await _asked(toy, stack, half) for _ in range(3)]
        while toy.service.shutdown.running < 3:
            await asyncio.sleep(0)  # a node without links answers at once
            await toy.engine.nodes()
        late = await _asked(toy, stack, ASK)
        assert (await late[0].readline()).startswith(b"HTTP/1.1 200 ")
        assert await slow[0][0].read() == b""


@pytest.mark.asyncio
async def test_an_answer_that_runs_is_never_ended_for_another() -> None:
    body = b'{"model": "toy", "prompt": "a", "stream": true, "max_tokens": %d}' % ENDLESS
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
    ask = head + b"Content-Type: application/json\r\n\r\n" + body
    async with Toy(connections=1) as toy, AsyncExitStack() as stack:
        running = await _asked(toy, stack, ask)
        await running[0].readuntil(b"data: ")
        late = await _asked(toy, stack, ASK)
        assert (await late[0].readline()).startswith(b"HTTP/1.1 503 ")
        await running[0].readuntil(b"data: ")
