"""Prompts become tokens: the event loop reads only short ones, and nobody overtakes himself."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from asyncspec.core.machine import Cancelled, Finish, Stopped, Submitted
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_nodes.serving.service import SHORT, TextService
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import write_frame
from asyncspec_protocol.messages import Cancel, Finished, Output, Submit
from nodes.manual_thread import ManualThread
from nodes.test_service import ASK, Letters

RULES = ServingConfig(context_length=10**6, eos=frozenset({0}), policy="flowspec")
MOST = 5
"""Requests at a time."""


class Reader(Letters):
    """A tokenizer that is asked for long texts only where that holds up nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.on_thread = False

    def encode(self, text: str) -> tuple[int, ...]:
        assert self.on_thread or len(text) <= SHORT
        if "broken" in text:
            raise RuntimeError("broken")
        return super().encode(text)


class User:
    """A client. Its prompts begin with its name and their number."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self.asked = 0
        # Requests that are neither refused nor begun nor cancelled, in their order.
        self.undecided: list[int] = []

    def send(self, message: Output | Finished, /) -> None:
        assert isinstance(message, Finished)
        self._world.received(self, message)


class Messages:
    """A client behind a real link's frames."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ends: list[Finished] = []

    def send(self, message: Output | Finished, /) -> None:
        write_frame(message)
        if isinstance(message, Output):
            self.outputs.append(message)
        else:
            self.ends.append(message)


class World:
    """A service, its users, a machine that does what it is told, and a thread."""

    def __init__(self) -> None:
        self.reader, self.worker = Reader(), ManualThread()
        self.service = TextService(self.reader, RULES, self._fed, self.worker, max_requests=MOST)
        self.users = {name: User(name, self) for name in "abc"}
        # The machine's requests, and whose they are.
        self.running: dict[int, tuple[User, int]] = {}
        # What was said of each that is over.
        self.ends: dict[tuple[str, int], str] = {}

    @property
    def taken(self) -> int:
        return len(self.running) + sum(len(user.undecided) for user in self.users.values())

    def ask(self, user: User, text: str, **how: object) -> int:
        user.asked += 1
        prompt = f"{user.name}{user.asked}:{text}"
        user.undecided.append(user.asked)
        self.service.client(user, replace(ASK, request=user.asked, prompt=prompt, **how))
        return user.asked

    def step(self) -> None:
        self.reader.on_thread = True
        self.worker.step()
        self.reader.on_thread = False

    def end(self, number: int, reason: str) -> None:
        self.service.finish(Finish(number, reason, stats={"prompt_tokens": 1.0}))

    def received(self, user: User, end: Finished) -> None:
        """A user is told of an end."""
        key = (user.name, end.request)
        assert key not in self.ends
        self.ends[key] = end.code or end.reason
        mine = next((n for n, who in self.running.items() if who == (user, end.request)), None)
        if mine is not None:
            del self.running[mine]
        elif end.code == "busy" or end.reason == "cancelled":
            user.undecided.remove(end.request)
        else:
            assert user.undecided.pop(0) == end.request  # nobody overtakes himself

    def _fed(self, event: Submitted | Cancelled | Stopped) -> None:
        if isinstance(event, Submitted):
            text = "".join(map(chr, event.request.prompt))
            name, number = text[0], int(text[1 : text.index(":")])
            user = self.users[name]
            assert user.undecided.pop(0) == number
            self.running[event.request.request] = (user, number)
        else:
            assert isinstance(event, Cancelled)
            self.end(event.request, "cancelled")


users = st.sampled_from("abc")


class Readings(RuleBasedStateMachine):
    """Whatever users do, and whenever the thread gets on."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.users = self.world.users

    @rule(name=users, length=st.sampled_from([1, SHORT - 9, SHORT + 1]), most=st.integers(0, 1))
    def ask(self, name: str, length: int, most: int) -> None:
        user, full = self.users[name], self.world.taken >= MOST
        ahead = list(user.undecided)
        number = self.world.ask(user, "x" * length, max_new_tokens=most)
        busy = self.world.ends.get((name, number)) == "busy"
        assert busy == full
        if not busy:
            assert (number in user.undecided) == (length > SHORT or ahead != [])

    @rule(name=users)
    def ask_for_what_breaks(self, name: str) -> None:
        """A mistake of the tokenizer's on the thread ends that request alone."""
        self.world.ask(self.users[name], "broken" + "x" * SHORT)

    @rule(name=users, back=st.integers(0, 6))
    def cancel(self, name: str, back: int) -> None:
        user = self.users[name]
        number = user.asked - back
        over = (name, number) in self.world.ends
        self.world.service.client(user, Cancel(number))
        if number > 0 and not over:
            assert self.world.ends[name, number] == "cancelled"

    @rule(name=users)
    def leave(self, name: str) -> None:
        user = self.users[name]
        self.world.service.client_gone(user)
        assert user.undecided == []
        assert all(who is not user for who, _ in self.world.running.values())

    @rule(name=users)
    def ask_again(self, name: str) -> None:
        user = self.users[name]
        if user.undecided:
            with pytest.raises(RemoteProtocolError, match="still running"):
                self.world.service.client(user, replace(ASK, request=user.undecided[0]))

    @precondition(lambda self: self.world.worker)
    @rule()
    def work(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.world.end(data.draw(st.sampled_from(sorted(self.world.running))), "length")

    @invariant()
    def bounded(self) -> None:
        assert self.world.taken <= MOST

    def teardown(self) -> None:
        while self.world.worker:
            self.world.step()
        for number in sorted(self.world.running):
            self.world.end(number, "length")
        asked = {(user.name, n + 1) for user in self.users.values() for n in range(user.asked)}
        assert set(self.world.ends) == asked


TestReadings = Readings.TestCase


def test_an_internal_error_on_the_thread_is_reported() -> None:
    world = World()
    number = world.ask(world.users["a"], "broken" + "x" * SHORT)
    world.step()
    assert world.ends["a", number] == "internal"
    assert [str(error) for error in world.worker.errors] == ["broken"]


def test_a_prompt_that_was_dropped_is_not_read() -> None:
    world = World()
    user = world.users["a"]
    number = world.ask(user, "x" * SHORT)
    world.service.client(user, Cancel(number))
    world.step()
    assert world.reader.read == []


def test_a_long_beginning_is_read_on_the_thread() -> None:
    world = World()
    user = world.users["a"]
    number = world.ask(user, "x", given=(1,) * 5000, max_new_tokens=6000)
    assert user.undecided == [number]
    assert not world.running
    user.send = lambda message: None  # type: ignore[method-assign]
    world.step()
    assert len(world.running) == 1


def test_long_text_takes_several_messages() -> None:
    """A frame has a bound; whoever is sent more loses his link."""
    reader, worker, got = Reader(), ManualThread(), Messages()
    ids = (0x1F600,) * (3 << 20)
    rules = replace(RULES, context_length=1 << 23)
    service = TextService(reader, rules, lambda event: None, worker, max_requests=MOST)
    service.client(got, replace(ASK, prompt="", prompt_ids=ids, prompt_only=True))
    assert len(worker) == 1  # decoding holds nobody up
    worker.run()
    assert "".join(one.text for one in got.outputs) == "\U0001f600" * len(ids)
    assert tuple(token for one in got.outputs for token in one.token_ids) == ids
    (end,) = got.ends
    assert (end.reason, end.stats) == ("stop", {"prompt_tokens": float(len(ids))})


def test_tokens_need_no_reading() -> None:
    world = World()
    world.users["a"].undecided.append(7)
    ids = tuple(map(ord, "a7:")) + (1,) * (2 * SHORT)
    submit: Submit = replace(ASK, prompt="", prompt_ids=ids)
    world.service.client(world.users["a"], submit)
    assert len(world.running) == 1
    assert not world.worker


def test_a_conversation_is_never_read_on_the_event_loop() -> None:
    """Its template is a foreign program. A short one does not wait for others' long prompts."""
    reader, slow, quick = Reader(), ManualThread(), ManualThread()
    fed: list[object] = []
    service = TextService(reader, RULES, fed.append, slow, quick, max_requests=MOST)
    first, second = Messages(), Messages()
    service.client(first, replace(ASK, request=1, prompt="", chat="x" * (SHORT + 1)))
    service.client(second, replace(ASK, request=1, prompt="", chat="x"))
    assert (len(slow), len(quick), fed) == (1, 1, [])
    # Nobody overtakes himself.
    service.client(first, replace(ASK, request=2, prompt="", chat="x"))
    service.client(second, replace(ASK, request=2, prompt="", chat="x" * (SHORT + 1)))
    service.client(second, replace(ASK, request=3, prompt="x"))
    assert (len(slow), len(quick), fed) == (2, 3, [])
    reader.on_thread = True
    quick.run()
    assert len(fed) == 3
    slow.run()
    assert len(fed) == 5
