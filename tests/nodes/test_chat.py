"""``asyncspec chat``: commands, settings, what reaches the terminal, and both ways to a model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec.core.stats import MAX_BREAKS
from asyncspec_nodes.cli import main
from asyncspec_nodes.console.output import harmless
from asyncspec_nodes.plugins.chat.chat_command import Chat
from asyncspec_nodes.plugins.chat.screen import (
    SETTABLE,
    Command,
    Screen,
    edited_lines,
    piped_lines,
    read_setting,
)
from asyncspec_nodes.plugins.chat.talkers import (
    ChatEvent,
    ClusterTalker,
    End,
    HttpTalker,
    Piece,
    Reading,
    Settings,
    StreamedAnswer,
    Talker,
)
from asyncspec_nodes.serving.requests import ChatText, prepare
from asyncspec_protocol.messages import Submit
from toy_service import RULES, Toy, reference


@given(st.text())
def test_no_text_commands_the_terminal(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    assert all(c.isprintable() or c in "\n\t" or ord(c) > 0x9F for c in shown)
    assert harmless(shown) == shown


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_setting_is_taken_or_refused(name: str, value: str) -> None:
    with contextlib.suppress(UserError):
        assert read_setting(f"{name} {value}")[0] in SETTABLE
    for known in SETTABLE:
        with contextlib.suppress(UserError):
            assert read_setting(f"{known} {value}")[0] == known


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("temperature 0.5", ("temperature", 0.5)),
        ("top-k 3", ("top_k", 3)),
        ("max-tokens=7", ("max_new_tokens", 7)),
        ("seed -", ("seed", None)),
    ],
)
def test_settings(text: str, read: tuple[str, float | None]) -> None:
    assert read_setting(text) == read


def test_commands_and_messages() -> None:
    assert Command.of("/set seed 3") == Command("set", "seed 3")
    assert Command.of("hello /set") is None
    assert Command.of("//etc is a directory") is None


class Scripted:
    """Answers with its settings and what it heard; a message "fail" fails."""

    name = "scripted"

    async def answer(
        self, messages: Sequence[ChatText], settings: Settings
    ) -> AsyncGenerator[ChatEvent, None]:
        if messages[-1].content == "fail":
            raise ClusterError("it failed")
        yield Reading(64, 128)
        yield Piece(json.dumps([one.content for one in messages]), 2)
        yield Piece(f" {dict(settings)}", 1)
        yield End("stop", {"tokens_per_second": 5.0})


class Failing(Scripted):
    """Answers, fails, or is stopped before there is any text."""

    failure = ""

    async def answer(
        self, messages: Sequence[ChatText], settings: Settings
    ) -> AsyncGenerator[ChatEvent, None]:
        if self.failure == "error":
            raise ClusterError("429: try again later")
        if not self.failure:
            async for event in super().answer(messages, settings):
                yield event


async def said(*lines: str) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def talk(*lines: str, talker: Talker | None = None) -> Chat:
    chat = Chat(talker or Scripted(), Screen(plain=True), "", {})
    await chat.work(said(*lines))
    return chat


@pytest.mark.asyncio
async def test_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    chat = await talk(
        "/system be brief", "/set seed 3", "one", "/retry", "fail", "//two", "/bye", "three"
    )
    reported = capsys.readouterr()
    answers = reported.out.splitlines()
    assert answers[0] == answers[1] == '["be brief", "one"] {\'seed\': 3}'
    assert answers[2].startswith('["be brief", "one", ')
    assert answers[2].endswith(', "/two"] ' + "{'seed': 3}")
    assert reported.err == "asyncspec: it failed\n"
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 2


@pytest.mark.asyncio
async def test_a_question_that_failed_is_asked_again() -> None:
    """And where another answer to one fails, the question and its old answer stay."""
    talker = Failing()
    chat = Chat(talker, Screen(plain=True), "", {})

    async def lines() -> AsyncIterator[str]:
        yield "one"
        answered = list(chat.messages)
        for talker.failure in ("error", "stop"):
            yield "/retry"
            assert chat.messages == answered
        for talker.failure in ("error", "stop"):
            yield "two"
            yield "/retry"
            assert chat.messages == answered
        talker.failure = ""
        yield "/retry"
        assert [one.content for one in chat.messages[::2]] == ["one", "two"]
        assert len(chat.messages) == 4
        yield "/retry"
        assert [one.role for one in chat.messages] == ["user", "assistant"] * 2
        talker.failure = "error"
        yield "three"
        yield "/reset"
        talker.failure = ""
        yield "/retry"
        assert chat.messages == []

    await chat.work(lines())


@pytest.mark.asyncio
async def test_mistakes_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    chat = await talk("/retry", "/nothing", "/set heat 3", "/set seed x", "/set temperature -1")
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "asyncspec: nothing was asked yet; ask something"
    assert errors[1] == "asyncspec: there is no command /nothing; give /help for a list"
    assert errors[2].startswith("asyncspec: there is no setting 'heat'; there are temperature, ")
    assert errors[3] == "asyncspec: seed is 'x'; it must be 0 or more and below 2**63"
    assert errors[4] == "asyncspec: temperature is '-1'; it must be 0 (greedy) or more"
    assert (chat.messages, chat.settings) == ([], {})
    assert (await talk("one", "/reset")).messages == []


@pytest.mark.asyncio
async def test_both_ways_lead_to_the_same_answer() -> None:
    """By HTTP and by the link of a draft node, pass by pass."""
    messages = [ChatText("system", "s"), ChatText("user", "é <b>")]
    settings: Settings = {"temperature": 0.7, "seed": 5, "max_new_tokens": 30}
    async with Toy("link", keys=("secret",)) as toy:
        client = toy.engine.client  # type: ignore[union-attr]
        received: list[str] = []
        ends: list[End] = []
        async with HttpTalker(f"{toy.url}/v1/", "secret") as http:
            assert http.name == "toy"
            for talker in (http, ClusterTalker(client, "toy")):
                events = [event async for event in talker.answer(messages, settings)]
                pieces = [event for event in events if isinstance(event, Piece)]
                assert sum(piece.tokens for piece in pieces) <= 30
                received.append("".join(piece.text for piece in pieces))
                ends += [event for event in events if isinstance(event, End)]
                with pytest.raises(UserError):
                    async for _ in talker.answer([ChatText("assistant", "x")], {}):
                        pass
        assert received[0] == received[1] != ""
        assert [end.reason for end in ends] == [ends[0].reason] * 2
        with pytest.raises(UserError, match="give it as --api-key"):
            await HttpTalker(toy.url).__aenter__()
        with pytest.raises(UserError, match="--model is x; there are toy"):
            await HttpTalker(toy.url, "secret", "x").__aenter__()


@pytest.mark.asyncio
async def test_chats_sample_as_llama_cpp_where_the_model_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over both ways; what the model recommends, and what the user sets, wins."""
    asked: list[Sampling] = []
    for recommended, settings, expected in (
        (Defaults(), {}, (0.8, 40, 0.95, 0.05)),
        (Defaults(temperature=0.6, min_p=0.0), {}, (0.6, 40, 0.95, 0.0)),
        (Defaults(), {"temperature": 0.0, "top_k": 3}, (0.0, 3, 0.95, 0.05)),
    ):
        async with Toy("link", rules=replace(RULES, defaults=recommended)) as toy:
            client = toy.engine.client  # type: ignore[union-attr]
            async with HttpTalker(toy.url) as http:
                for talker in (http, ClusterTalker(client, "toy")):
                    with monkeypatch.context() as patch:

                        def noted(submit: Submit, *rest: Any) -> Any:
                            request = prepare(submit, *rest)
                            asked.append(request.sampling)
                            return request

                        patch.setattr("asyncspec_nodes.serving.service.prepare", noted)
                        async for _ in talker.answer([ChatText("user", "hi")], settings):
                            pass
                    found = asked[-1]
                    assert (found.temperature, found.top_k, found.top_p, found.min_p) == expected


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("cuts", [{0}, {1, 4}])
async def test_an_answer_whose_stream_breaks_off_goes_on(
    cuts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seed that the service has chosen. ``cuts``: pieces after which it does."""
    asked: list[Submit] = []
    settings: Settings = {"temperature": 0.7, "max_new_tokens": 100, "ignore_eos": True}
    async with Toy() as toy, HttpTalker(toy.url) as http:
        ask = toy.engine.ask

        def recorded(submit: Submit) -> AsyncGenerator[Event, None]:
            asked.append(submit)
            return ask(submit)

        monkeypatch.setattr(toy.engine, "ask", recorded)
        pieces: list[Piece] = []
        async for event in http.answer([ChatText("user", "hello")], settings):
            if isinstance(event, Piece):
                if len(pieces) in cuts:
                    toy.cut()
                pieces.append(event)
        assert event == End("length", event.stats)
        tokens, text = reference(asked[0])
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.tokens for piece in pieces) == len(tokens)
    assert [bool(one.given) for one in asked] == [False] + len(cuts) * [True]


@pytest.mark.asyncio
async def test_an_answer_of_another_target_does_not_go_on() -> None:
    answer = StreamedAnswer()
    assert not answer.resumable
    for text, new in (("one ", "one "), ("two", "two")):
        choice = {"delta": {"content": text}, "token_ids": [1, 2]}
        assert answer.add({"seed": 3}, choice) == Piece(new, 2)
    assert answer.begin() == {"seed": 3, "given_token_ids": [1, 2, 1, 2]}
    assert answer.add({}, {"delta": {"content": "one tw"}}) == Piece("", 0)
    assert answer.add({}, {"delta": {"content": "o, three"}}) == Piece(", three", 0)
    answer.begin()
    with pytest.raises(ClusterError, match="another target"):
        answer.add({}, {"delta": {"content": "One"}})
    for _ in range(MAX_BREAKS):
        assert answer.resumable
        answer.breaks += 1
    assert not answer.resumable


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["pipe", "file"])
async def test_piped_lines(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é\n\n two \nthr\ree\r\n\r\nfour\r".encode()
    if kind == "file":
        (tmp_path / "lines").write_bytes(text)
        stream = (tmp_path / "lines").open()
    else:
        end, start = os.pipe()
        os.write(start, text)
        os.close(start)
        stream = os.fdopen(end)
    with stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert [line async for line in piped_lines()] == ["é", " two ", "thr\ree", "four"]


@pytest.mark.asyncio
async def test_the_line_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alt+Enter is a new line, Enter sends, Ctrl-C clears, Ctrl-D ends; lines are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    notes: list[str] = []
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("one\x1b\rtwo\rwrong\x03\r\x04")
        lines = [line async for line in edited_lines(notes.append)]
    assert lines == ["one\ntwo"]
    assert notes == ["Ctrl-D or /bye leaves."]
    kept = tmp_path / "asyncspec/chat_history"
    assert "+one\n+two\n" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--api-key", "x"], "--api-key goes with --url; leave it out or add --url URL"),
        (["--url", "localhost:8000"], "--url is localhost:8000; it must be http://HOST:PORT"),
        (["--url", "http://x", "--stages", "2"], "--stages is the running service's choice"),
        (["--top-p", "3"], "--top-p is '3'; it must be above 0 and at most 1"),
        (["--url", "http://127.0.0.1:9"], "the service at http://127.0.0.1:9 cannot be reached"),
        (["--connect", "h:1", "--target", "x"], "--target is the running cluster's choice"),
    ],
)
def test_mistakes(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["chat", *argv]) in (1, 2)
    assert says in capsys.readouterr().err
