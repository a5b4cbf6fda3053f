"""The draft node's text service: what is refused, what is passed on, what the client gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.core.machine import Cancelled, Emit, Finish, Stopped, Submitted
from asyncspec.core.sampling import Sampling
from asyncspec.trace.collector import OPERATORS_ONLY
from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.completions import Completion, CompletionRequest
from asyncspec_nodes.http.streaming import error_of
from asyncspec_nodes.node.host import NodeHost
from asyncspec_nodes.serving.requests import ServingConfig
from asyncspec_nodes.serving.service import MISFIT, SHORT, TextService
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import Cancel, Drain, Drained, Finished, Output, Submit
from asyncspec_protocol.sampling import Constraint
from nodes.manual_thread import ManualThread

ASK = Submit(request=7, prompt="abc", max_new_tokens=5, seed=0, temperature=0.0, top_k=0, top_p=1.0)
RULES = ServingConfig(10, frozenset({0}), "flowspec", vocab=200, layers=8)


class Letters:
    """A tokenizer with a token per character."""

    decodes_as_whole = False
    template = ""

    def __init__(self) -> None:
        self.read: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.read.append(text)
        return tuple(ord(c) for c in text.strip())

    def render(self, chat: str) -> tuple[int, ...]:
        return self.encode(chat)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def is_special(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False

    def close(self) -> None:
        pass


class Inbox:
    """A client's end."""

    def __init__(self) -> None:
        self.got: list[Output | Finished] = []

    def send(self, message: Output | Finished, tensor: object = None, /) -> None:
        self.got.append(message)


class World:
    """A service and what it has fed to its machine."""

    def __init__(self, rules: ServingConfig = RULES, most: int = 2) -> None:
        self.fed: list[Submitted | Cancelled | Stopped] = []
        self.codec = Letters()
        self.worker = ManualThread()
        self.service = TextService(
            self.codec, rules, self.fed.append, self.worker, max_requests=most
        )
        self.inbox = Inbox()

    def ask(self, submit: Submit = ASK) -> None:
        self.service.client(self.inbox, submit)
        self.worker.run()


def test_a_request_reaches_the_machine_and_its_text_the_client() -> None:
    world = World()
    world.ask()
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    request = submitted.request
    assert request.prompt == (97, 98, 99)
    assert request.max_new_tokens == 5
    assert request.stop_tokens == {0}
    assert request.policy == "flowspec"
    world.service.emit(Emit(request.request, (120, 121)))
    world.service.finish(Finish(request.request, "stop", stats={"new_tokens": 2.0}))
    assert world.inbox.got == [
        Output(7, (120, 121), "xy", prompt_tokens=3),
        Finished(7, "stop", "", {"new_tokens": 2.0}),
    ]


class Words(Letters):
    """Words with a space before each, which is taken off the first of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(chr, ids))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"prompt": "abc"}, " x y"),
        ({"prompt": "", "prompt_ids": (97, 98)}, " x y"),
        ({"prompt": "", "chat": "abc"}, "x y"),
    ],
)
def test_a_completion_goes_on_its_prompt_and_what_a_chat_brings_is_a_text_of_its_own(
    asked: dict[str, object], text: str
) -> None:
    world = World()
    world.service = TextService(Words(), RULES, world.fed.append, world.worker, max_requests=2)
    world.ask(replace(ASK, **asked))
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    number = submitted.request.request
    assert world.service.emit(Emit(number, (120, 121))) == text


@pytest.mark.parametrize("field", ["prompt", "chat"])
@pytest.mark.parametrize("times", [1, SHORT])
def test_several_answers_to_one_prompt_are_one_reading(field: str, times: int) -> None:
    """A tokenizer takes a second for a long prompt."""
    world = World(replace(RULES, context_length=4 * SHORT), most=9)
    texts = ["abc" * times, "abd" * times]
    for number, text in enumerate((texts[0], texts[0], texts[1], texts[1])):
        world.ask(replace(ASK, **{"request": number, "prompt": "", field: text}))
    assert world.codec.read == texts
    prompts = [fed.request.prompt for fed in world.fed if isinstance(fed, Submitted)]
    assert prompts == [(97, 98, 99) * times] * 2 + [(97, 98, 100) * times] * 2


def test_the_limit_is_cut_to_the_context_and_eos_may_be_ignored() -> None:
    world = World()
    world.ask(replace(ASK, max_new_tokens=100, ignore_eos=True))
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    assert submitted.request.max_new_tokens == 7
    assert submitted.request.stop_tokens == frozenset()


def test_what_bounds_a_context_is_told() -> None:
    world = World(replace(RULES, context_reason="the top-k of its sparse attention"))
    for change in ({"prompt": "x" * 10}, {"max_new_tokens": 9, "must_fit": True}):
        world.ask(replace(ASK, **change))
    errors = [finished.detail for finished in world.inbox.got if isinstance(finished, Finished)]
    assert len(errors) == 2
    assert all("context is 10 (the top-k of its" in x or "of 10 (the top-k of" in x for x in errors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "  "}, "the prompt has no tokens"),
        (
            {"prompt": "caf\u00e9"},
            "the tokenizer's token 233, but the target's vocabulary ends at 199",
        ),
        (
            {"chat": "caf\u00e9"},
            "the tokenizer's token 233, but the target's vocabulary ends at 199",
        ),
        ({"prompt": "x" * 10}, "10 tokens, but the target's context is 10, answer included"),
        ({"prompt": "x" * 5_000_000}, "more than 4194304 bytes"),
        ({"max_new_tokens": -1}, "max-new-tokens is -1"),
        ({"echo": True, "prompt_logprobs": 21}, "prompt-log-probs is 21"),
        ({"policy": "best"}, "unknown policy 'best'; there are autoregressive"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top-p is 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_k": -1}, "top-k is -1"),
        ({"min_p": 1.0}, "min-p is 1"),
        (
            {"repetition_penalty": 0.0},
            "repetition-penalty is 0; it must be 1e-06 to 1e+06 (1: none)",
        ),
        ({"presence_penalty": 2.5}, "presence-penalty is 2.5; it must be -2 to 2"),
        ({"frequency_penalty": -3.0}, "frequency-penalty is -3; it must be -2 to 2"),
        ({"features": (4, 2)}, "features are ascending depths"),
        ({"features": (2, 9, -1)}, "features of depth 9 are requested, but the target has 8"),
        ({"features": (2, 4)}, "features come with policies that draft nothing, not with flowspec"),
        ({"stop": ("a",) * 65}, "there are 65 stop strings; give at most 64"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"stop": ("a" * 2000,)}, "a stop string has 2000 characters; give at most 1024"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "below 2**63"),
    ],
)
def test_invalid_requests_are_refused_before_any_work(change: dict[str, object], says: str) -> None:
    world = World()
    world.ask(replace(ASK, **change))
    assert world.fed == []
    (finished,) = world.inbox.got
    assert isinstance(finished, Finished)
    assert finished.reason == "error"
    assert finished.stats == {}
    assert says in finished.detail
    assert "\n" not in finished.detail


def test_the_settings_reach_the_machine() -> None:
    world = World()
    world.ask(
        replace(ASK, repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0, top_k=3)
    )
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    assert submitted.request.sampling == Sampling(
        top_k=3, repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0
    )


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abxy")])
def test_a_stop_string_ends_text_and_work(include: bool, text: str) -> None:
    world = World()
    world.ask(replace(ASK, stop=("xy",), include_stop=include))
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    number = submitted.request.request
    world.service.emit(Emit(number, tuple(b"abx")))
    assert world.inbox.got == [Output(7, tuple(b"abx"), "ab", prompt_tokens=3)]
    world.service.emit(Emit(number, tuple(b"yz")))
    assert world.fed[1:] == [Stopped(number, 4)]
    # What the machine did before it heard of it is not for the client.
    assert world.service.emit(Emit(number, tuple(b"c"))) == ""
    world.service.finish(Finish(number, "length", stats={"new_tokens": 4.0}))
    assert world.inbox.got[1:] == [
        Output(7, tuple(b"y"), text[2:]),
        Finished(7, "stop", "", {"new_tokens": 4.0}, stop="xy"),
    ]


def test_held_back_text_comes_at_the_end() -> None:
    world = World()
    world.ask(replace(ASK, stop=("xyz",)))
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    world.service.emit(Emit(submitted.request.request, tuple(b"axy")))
    world.service.finish(Finish(submitted.request.request, "length"))
    assert world.inbox.got == [
        Output(7, tuple(b"axy"), "a", prompt_tokens=3),
        Output(7, (), "xy"),
        Finished(7, "length", "", {}),
    ]


def _call() -> Completion:
    """Whose errors name the parameter ``prompt``."""
    return CompletionRequest(prompt="x").call(RequestContext())


@pytest.mark.parametrize(
    ("code", "status", "retried"), [(BREAKS, 422, False), ("", 503, True), ("busy", 429, True)]
)
def test_a_request_that_breaks_the_pipeline_is_not_to_be_sent_again(
    code: str, status: int, retried: bool
) -> None:
    """Clients of the API send again by themselves what got a 5xx or a 429."""
    world = World()
    world.ask()
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    stats = {"new_tokens": 0.0}
    world.service.finish(
        Finish(submitted.request.request, "error", stats=stats, detail="why", code=code)
    )
    (finished,) = world.inbox.got
    assert isinstance(finished, Finished)
    error = error_of(finished, _call())
    assert error is not None
    assert (error.status, error.message) == (status, "why")
    assert ("Retry-After" in error.headers) == retried


def test_without_a_token_source_only_policies_that_need_none_work() -> None:
    world = World(replace(RULES, drafts=False))
    world.ask()
    world.ask(replace(ASK, policy="autoregressive"))
    assert len(world.fed) == 1
    (finished,) = world.inbox.got
    assert isinstance(finished, Finished)
    assert "needs a token source" in finished.detail


def test_cancelling_and_leaving_cancel_the_right_requests() -> None:
    world, other = World(most=4), Inbox()
    world.ask()
    world.ask(replace(ASK, request=8))
    world.service.client(other, ASK)
    numbers = [s.request.request for s in world.fed if isinstance(s, Submitted)]
    world.fed.clear()
    world.service.client(world.inbox, Cancel(8))
    world.service.client(world.inbox, Cancel(99))
    assert world.fed == [Cancelled(numbers[1])]
    world.fed.clear()
    world.service.client_gone(other)
    assert world.fed == [Cancelled(numbers[2])]


@pytest.mark.parametrize("change", [{}, {"prompt": "x" * (SHORT + 1)}, {"prompt": ""}])
def test_nothing_is_kept_of_a_request_for_tokens(change: dict[str, Any]) -> None:
    """Read at once or on the thread, refused, or cancelled before it is read."""
    world = World(replace(RULES, context_length=2 * SHORT))
    before = world.service.totals.distributions
    ask = replace(ASK, prompt_only=True, **change)
    for _ in range(3):
        world.ask(ask)
    world.service.client(world.inbox, ask)
    world.service.client(world.inbox, Cancel(ask.request))
    world.worker.run()
    assert not world.service.totals._arrived
    assert world.service.totals.distributions == before


def test_too_many_requests_and_numbers_in_use() -> None:
    world = World(most=2)
    world.ask()
    with pytest.raises(RemoteProtocolError, match="request 7 is still running"):
        world.ask()
    world.ask(replace(ASK, request=8))
    world.ask(replace(ASK, request=9))
    (finished,) = world.inbox.got
    assert isinstance(finished, Finished)
    assert finished.detail == "2 requests are waiting already; try again later"


def test_tenants_of_requests_are_kept_apart_and_blinded() -> None:
    """What a recorded trace has of a tenant is no name that a client could ask under."""
    world = World(most=9)
    for number, tenant in enumerate(("", "one", "other", "one", "")):
        world.ask(replace(ASK, request=number, tenant=tenant))
    reported = [event.request.tenant for event in world.fed if isinstance(event, Submitted)]
    assert reported[0] == reported[4] == ""
    assert reported[1] == reported[3]
    assert len({"", "one", "other", *reported}) == 5


@pytest.mark.parametrize("times", [1, 2 * SHORT])
def test_a_tokenized_prompt_is_reused_for_its_own_tenant_only(times: int) -> None:
    """How fast a prompt is read would tell that another tenant has just asked the same."""
    world = World(ServingConfig(context_length=10**6, eos=frozenset(), policy="flowspec"), most=9)
    for number, tenant in enumerate(("one", "one", "other")):
        world.ask(replace(ASK, request=number, prompt="a" * times, tenant=tenant))
    assert len(world.codec.read) == 2


def test_an_answer_that_breaks_off_its_grammar_is_an_error() -> None:
    """Where the parser's limits are met the stage can draw nothing but an end."""
    letters = [chr(i).encode() for i in range(200)]
    grammars = Grammars(lambda: Vocabulary(letters, {0}, (0,)))
    for tokens, reason in (((120, 121, 0), "stop"), ((120, 0), "error")):
        world = World(replace(RULES, grammars=grammars))
        world.ask(replace(ASK, constraint=Constraint('start: "xy"')))
        (submitted,) = world.fed
        assert isinstance(submitted, Submitted)
        world.service.emit(Emit(submitted.request.request, tokens))
        world.service.finish(Finish(submitted.request.request, "stop", stats={"new_tokens": 3.0}))
        finished = world.inbox.got[-1]
        assert isinstance(finished, Finished)
        assert finished.reason == reason
        error = error_of(finished, _call())
        assert (error is None) == (reason == "stop")
        assert error is None or error.status == 400


def test_tokens_that_do_not_fit_the_grammar_begin_no_answer() -> None:
    letters = [chr(i).encode() for i in range(200)]
    grammars = Grammars(lambda: Vocabulary(letters, {0}, (0,)))
    world = World(replace(RULES, grammars=grammars))
    for given in ((120, 121, 121), (121,), (120, 0)):
        world.ask(replace(ASK, given=given, constraint=Constraint('start: "xy"')))
        assert world.inbox.got[-1] == Finished(7, "error", MISFIT, {}, "given_token_ids")
    assert not world.fed


def test_a_drained_service_finishes_what_it_has_and_takes_nothing_new() -> None:
    world, reported = World(most=9), list[str]()
    world.ask()
    world.service.drain(reported.append)
    world.ask(replace(ASK, request=8))
    assert world.inbox.got == [
        Finished(8, "error", "the draft node drains: it takes no new requests", {}, "draining")
    ]
    (refused,) = world.inbox.got
    assert isinstance(refused, Finished)
    error = error_of(refused, _call())
    assert error is not None
    assert error.status == 503
    # The rest of an answer that was begun elsewhere is no new request.
    world.ask(replace(ASK, request=9, given=(100,), given_text=1))
    assert [type(one) for one in world.fed] == [Submitted, Submitted]
    assert reported == []
    for number in (1, 2):
        world.service.finish(Finish(number, "length"))
        assert reported == [""] * (number == 2)
    world.service.drain(reported.append)
    assert reported == ["", ""]
    world.service.resume()
    world.ask(replace(ASK, request=8))
    assert len(world.fed) == 3


def test_a_drain_ends_with_a_cancelled_prompt_or_when_it_is_undone() -> None:
    world, reported = World(), list[str]()
    world.service.client(world.inbox, replace(ASK, prompt="a" * (SHORT + 1)))
    world.service.drain(reported.append)
    assert reported == []
    world.service.client(world.inbox, Cancel(ASK.request))
    assert reported == [""]
    world.service.client(world.inbox, replace(ASK, given=(100,), given_text=1))
    world.service.drain(reported.append)
    world.service.resume()
    assert reported == ["", "it takes requests again"]


class Operator:
    """A client's link, of an operator or of somebody else."""

    def __init__(self, operator: bool) -> None:
        self.operator = operator
        self.got: list[object] = []

    def send(self, message: object) -> None:
        self.got.append(message)


@pytest.mark.parametrize(
    ("operator", "answer"), [(True, Drained(3)), (False, Drained(3, OPERATORS_ONLY))]
)
def test_only_operators_drain(operator: bool, answer: Drained) -> None:
    host, world, link = NodeHost(make_logger(LogTable())), World(), Operator(operator)
    host.service = world.service
    host.received(cast(Any, link), Drain(3), None)
    assert link.got == [answer]
    assert world.service.draining == operator
    host.received(cast(Any, link), Drain(4, on=False), None)
    assert not world.service.draining


@pytest.mark.parametrize("stop", [(), ("bc",)])
def test_tokens_come_with_the_lengths_of_their_text(stop: tuple[str, ...]) -> None:
    """Where they are wanted, however many come at a time; what is held back counts where it
    comes."""
    world = World()
    world.ask(replace(ASK, stop=stop, text_lengths=True))
    (submitted,) = world.fed
    assert isinstance(submitted, Submitted)
    number = submitted.request.request
    world.service.emit(Emit(number, tuple(b"abx"), shared_tokens=2))
    lengths = (1, 0, 2) if stop else (1, 1, 1)
    want = Output(7, tuple(b"abx"), "abx", text_lengths=lengths, prompt_tokens=3, shared_tokens=2)
    assert world.inbox.got == [want]
