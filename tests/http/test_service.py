"""Everything around the answers: limits, metrics, health, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from itertools import pairwise
from typing import Any, Literal

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from actor.local_cluster import QUICK
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.sampling import Defaults
from asyncspec_nodes.client.answers import Answer, Prompt, answer_all
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.http import app
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.app import SHORT_BODY, Service
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.dialects import routes
from asyncspec_nodes.serving.service import SHORT
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Finished, Output, Submit
from toy_service import ENDLESS, RULES, Toy, ToyTokenizer, reference

pytestmark = pytest.mark.asyncio

ASK = {"model": "toy", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
LONG = {**ASK, "max_tokens": ENDLESS, "stream": True}
PATH, CHAT = "/v1/completions", "/v1/chat/completions"


async def numbers(web: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """What Prometheus reads: samples by name and labels."""
    async with web.get("/metrics") as reply:
        assert reply.status == 200
        text = await reply.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", [PATH, CHAT, "/v1/messages/count_tokens", "/tokenize"])
async def test_large_bodies_are_read_beside_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, so that it waits for one thread's turn at most."""
    threads: list[str] = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    for module in (app, routes):
        monkeypatch.setattr(module, "parse", noted)
    messages = [{"role": "user", "content": "x"}]
    ask = {"prompt": "x"} if path == PATH else {"messages": messages}
    note = "a" * SHORT_BODY
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        for more in ({}, {"note": note}, {"note": note}):
            body = {"model": "toy", "max_tokens": 1, **ask, **more}
            async with web.post(path, json=body) as reply:
                assert reply.status == 200, await reply.text()
    assert threads == ["MainThread", "bodies_0", "bodies_0"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
async def test_a_request_without_a_model_gets_the_only_one(model: dict[str, str | None]) -> None:
    asks: dict[str, dict[str, Any]] = {
        PATH: {"prompt": "x"},
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
    }
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        for path, ask in asks.items():
            async with web.post(path, json={**ask, **model, "max_tokens": 5}) as reply:
                assert reply.status == 200
                assert (await reply.json())["model"] == "toy"


async def test_too_many_at_a_time() -> None:
    async with Toy(concurrent=2) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**LONG, "n": 2}) as running:
            assert running.status == 200
            async with web.post(PATH, json=ASK) as reply:
                assert reply.status == 429
                assert int(reply.headers["Retry-After"]) > 0
                assert (await reply.json())["error"]["type"] == "rate_limit_error"
            running.close()
        await toy.settled()
        async with web.post(PATH, json=ASK) as reply:
            assert reply.status == 200


async def test_a_full_queue_is_no_client_error() -> None:
    """The ninth of nine prompts comes at a bad time: that is not exit code 2."""
    answers: list[Answer] = []
    ask = Submit(0, "", 60, seed=0, temperature=0, top_k=0, top_p=1, ignore_eos=True)
    async with Toy("link") as toy:
        host, port = toy.cluster.ports[Rank(0)]
        asker = await Client.connect(host, port, "toy", options=QUICK)
        await answer_all(
            asker, (Prompt(("a",)),) * 9, ask, concurrency=9, show=str, done=answers.append
        )
        await asker.close()
    errors = [answer.error for answer in answers if answer.error is not None]
    assert [type(error) for error in errors] == [ClusterError]
    assert "8 requests are waiting already" in str(errors[0])


@pytest.mark.parametrize("concurrency", [1, 2, 4])
async def test_answers_are_sent_as_soon_as_they_are_there(concurrency: int) -> None:
    """In the prompts' order, turn by turn: here one of a conversation's, and no more, that ends."""
    first: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    ask = Submit(0, "", 30, seed=0, temperature=0, top_k=0, top_p=1)
    prompts = (Prompt(("a", "b" * SHORT)), Prompt(("c",)), Prompt(("d",)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow = SlowToRead(monkeypatch)
        async with Toy("link") as toy:
            host, port = toy.cluster.ports[Rank(0)]
            asker = await Client.connect(host, port, "toy", options=QUICK)
            reported: list[Answer] = []

            def done(answer: Answer) -> None:
                reported.append(answer)
                if not first.done():
                    first.set_result(answer)

            pending = asyncio.create_task(
                answer_all(asker, prompts, ask, concurrency=concurrency, show=str, done=done)
            )
            assert (await first).turn == 0
            await slow.begun.wait()
            assert [(answer.index, answer.turn) for answer in reported] == [(0, 0)]
            slow.go.set()
            await pending
            await asker.close()
    places = [(answer.index, answer.turn) for answer in reported]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0)]


async def test_an_answer_that_takes_too_long() -> None:
    async with Toy(answer_seconds=0.5) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**LONG, "stream": False}) as reply:
            assert reply.status == 504
            assert (await reply.json())["error"]["code"] == "timeout"
        await toy.settled()


async def test_an_answer_that_takes_too_long_once_it_has_begun() -> None:
    for seconds in (0.5, 5.0, 50.0):  # on busy processors the first token may take long
        async with Toy(answer_seconds=seconds) as toy, aiohttp.ClientSession(toy.url) as web:
            async with web.post(PATH, json=LONG) as reply:
                events = [line async for line in reply.content if line.startswith(b"data: ")]
            await toy.settled()
        if reply.status != 504:
            break
    assert reply.status == 200
    assert json.loads(events[-1][6:])["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_internal_error_is_reported_at_once(
    stream: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(codec: ToyTokenizer, text: str) -> tuple[int, ...]:
        raise RuntimeError("broken")

    monkeypatch.setattr(ToyTokenizer, "encode", broken)
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**ASK, "stream": stream, "n": 3}) as reply:
            assert reply.status == 500
            assert (await reply.json())["error"]["code"] == "internal"
        assert "RuntimeError: broken" in capsys.readouterr().err
        await toy.settled()


class SlowToRead:
    """A tokenizer that reads long prompts when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        loop, encode = asyncio.get_running_loop(), ToyTokenizer.encode
        self.begun, self.go = asyncio.Event(), threading.Event()

        def wait_and_encode(codec: ToyTokenizer, text: str) -> tuple[int, ...]:
            if len(text) > SHORT:
                loop.call_soon_threadsafe(self.begun.set)
                assert self.go.wait(240)
                assert not fails, "broken"
            return encode(codec, text)

        monkeypatch.setattr(ToyTokenizer, "encode", wait_and_encode)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["node", "link"])
async def test_answers_go_on_while_a_long_prompt_is_read(
    over: Literal["node", "link"], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowToRead(monkeypatch)
    ask = {**ASK, "prompt": "hello" * SHORT, "temperature": 0}
    async with Toy(over) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json=LONG) as running:
            asked = asyncio.create_task(web.post(PATH, json=ask))
            await slow.begun.wait()
            for _ in range(100):
                assert await running.content.readline()
            assert not asked.done()
            slow.go.set()
            async with await asked as reply:
                (choice,) = (await reply.json())["choices"]
            running.close()
        (submit,) = msgspec.convert(ask, CompletionRequest).call(RequestContext()).submits
        assert choice["text"] == reference(submit)[1]
        await toy.settled()


@pytest.mark.parametrize("over", ["node", "link"])
async def test_a_disconnect_during_tokenization(
    over: Literal["node", "link"], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowToRead(monkeypatch)
    async with Toy(over) as toy, aiohttp.ClientSession(toy.url) as web:
        asked = asyncio.create_task(web.post(PATH, json={**LONG, "prompt": "hello" * SHORT}))
        await slow.begun.wait()
        asked.cancel()
        # The next one waits for nobody but the tokenizer.
        slow.go.set()
        async with web.post(PATH, json=ASK) as reply:
            assert reply.status == 200
        assert (await numbers(web))["asyncspec_requests_total", "toy", "length"] == 1
        await toy.settled()


@pytest.mark.parametrize("over", ["node", "link"])
async def test_a_mistake_of_ours_while_a_long_prompt_is_read(
    over: Literal["node", "link"], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowToRead(monkeypatch, fails=True)
    slow.go.set()
    async with Toy(over) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**ASK, "prompt": "hello" * SHORT}) as reply:
            assert reply.status == 500
            assert (await reply.json())["error"]["code"] == "internal"
        async with web.post(PATH, json=ASK) as reply:
            assert reply.status == 200
        await toy.settled()
    assert "background work has failed" in caplog.text


async def test_a_stream_says_that_it_is_alive() -> None:
    """Where nothing comes for a while: here no stage serves."""
    async with Toy(alive_seconds=0.05) as toy, aiohttp.ClientSession(toy.url) as web:
        await toy.cluster.stop(1)
        async with web.post(PATH, json=LONG) as reply:
            assert reply.status == 200
            assert await reply.content.readline() == b": alive\n"
            toy.cluster.start(1)
            async for line in reply.content:
                if line.startswith(b"data: "):
                    break
            reply.close()
        await toy.settled()


async def test_a_stream_whose_tokens_have_no_text_says_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here all text comes at the end; elsewhere special tokens and held text have none."""
    events: list[Output | Finished] = []
    add = ChoiceBuffer.add

    def counted(buffer: ChoiceBuffer, event: Output | Finished) -> None:
        events.append(event)
        add(buffer, event)

    monkeypatch.setattr(ChoiceBuffer, "add", counted)
    monkeypatch.setattr(ToyTokenizer, "decodes_as_whole", True)
    async with (
        Toy(alive_seconds=0.05) as toy,
        aiohttp.ClientSession(toy.url) as web,
        web.post(PATH, json=LONG) as reply,
    ):
        comments = 0
        while comments < 2:
            comments += bool(events)
            assert await reply.content.readline() == b": alive\n"
            assert await reply.content.readline() == b"\n"
        reply.close()
        await toy.settled()


@pytest.mark.parametrize(
    "prompt", [{"prompt": "\N{SNOWMAN}" * 2_800_000}, {"prompt_ids": (2**31 - 1,) * 1_700_000}]
)
async def test_a_prompt_that_no_message_has_room_for(prompt: dict[str, Any]) -> None:
    """Where a service or a list of prompts has one: over a link it is refused, and nothing else."""
    asked = Submit(0, "", 3, seed=0, temperature=0, top_k=0, top_p=1)
    async with Toy("link") as toy:
        (end,) = [event async for event in toy.engine.ask(replace(asked, **prompt))]
        assert isinstance(end, Finished)
        assert (end.reason, end.code, end.stats) == ("error", "prompt_too_long", {})
        assert [event async for event in toy.engine.ask(replace(asked, prompt="hello"))]
        await toy.settled()


async def test_health_and_readiness() -> None:
    async with Toy("link", stages=2) as toy, aiohttp.ClientSession(toy.url) as web:
        await toy.cluster.stop(2)
        while True:
            async with web.get("/ready") as reply:
                answer = await reply.json()
                if "stage 2" in answer.get("error", {}).get("message", ""):
                    assert reply.status == 503
                    break
        async with web.get("/health") as reply:
            assert reply.status == 200
        stage = toy.cluster.inspectors[1]
        while stage.status(0).missing != "stage 1 has no link to stage 2":
            await web.get("/health")
        toy.cluster.start(2)
        while True:
            async with web.get("/ready") as reply:
                if reply.status == 200:
                    break
        assert [toy.cluster.inspectors[rank].status(0).missing for rank in (1, 2)] == ["", ""]
        # The draft node goes and comes back: the service finds it again.
        await toy.cluster.stop(0)
        while True:
            async with web.get("/ready") as reply:
                if reply.status == 503:
                    break
        async with web.post(PATH, json=ASK) as reply:
            assert reply.status == 503
        toy.cluster.start(0)
        while True:
            async with web.post(PATH, json=ASK) as reply:
                if reply.status == 200:
                    break


async def until_ready_says(web: aiohttp.ClientSession, why: str) -> None:
    """A test's time-out is the bound."""
    while True:
        async with web.get("/ready") as reply:
            if reply.status == 503 and (await reply.json())["error"]["message"].startswith(why):
                return


@pytest.mark.parametrize("over", ["node", "link"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"fingerprint": "other"},
            "stage 2 is not connected; stage 2: rank 0 holds another target model than rank 2: "
            "give both the same checkpoint",
        ),
        (  # which the draft node has from stage 1
            {"layers": (3, 4)},
            "stage 1 has no link to stage 2; stage 2: rank 1 ends at layer 2 but rank 2 starts at "
            "3: correct the layers of one of them",
        ),
    ],
)
async def test_readiness_says_why_a_stage_is_refused(
    over: Literal["node", "link"], changes: dict[str, Any], why: str
) -> None:
    async with Toy(over, stages=2) as toy, aiohttp.ClientSession(toy.url) as web:
        await toy.cluster.stop(2)
        toy.cluster.changes[2] = changes
        toy.cluster.start(2)
        await until_ready_says(web, why)
        async with web.get("/state") as reply:
            assert (await reply.json())["missing"].startswith(why)
        await toy.cluster.stop(2)
        del toy.cluster.changes[2]
        toy.cluster.start(2)
        while True:
            async with web.get("/ready") as reply:
                if reply.status == 200:
                    break


async def test_requests_while_loading() -> None:
    """It is alive, and says of everything else what it waits for; then it serves."""
    service = Service(
        ServiceOptions(ApiKeys(("k",))), pending=lambda: "stage 2 (loading layers 4 to 7 of 8)"
    )
    sock = listen.bind("127.0.0.1", 0, whose="this test")
    key = {"Authorization": "Bearer k"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with Toy() as toy, HttpServer(service, sock) as server:
        async with aiohttp.ClientSession(server.url) as web:
            async with web.get("/health") as reply:
                assert reply.status == 200
            async with web.post(PATH, json=ASK) as reply:
                assert reply.status == 401
            for method, path, body in (
                ("GET", "/ready", None),
                ("GET", "/state", None),
                ("GET", "/v1/models", None),
                ("GET", "/v1/models/toy", None),
                ("POST", PATH, ASK),
                ("POST", CHAT, chat),
            ):
                async with web.request(method, path, json=body, headers=key) as reply:
                    assert reply.status == 503, path
                    assert reply.headers["Retry-After"] == "5"
                    assert (await reply.json())["error"] == {
                        "message": "the service is loading; it waits for stage 2 (loading layers 4 "
                        "to 7 of 8)",
                        "type": "server_error",
                        "param": None,
                        "code": "loading",
                    }
            async with web.get("/metrics", headers=key) as reply:
                assert reply.status == 200
            service.serve(toy.engine, "toy")
            while True:
                async with web.get("/ready") as reply:
                    if reply.status == 200:
                        break
            async with web.post(PATH, json=ASK, headers=key) as reply:
                assert reply.status == 200
                assert (await reply.json())["model"] == "toy"
        await toy.settled()


async def test_metrics_count_what_happened() -> None:
    async with Toy(stages=2) as toy, aiohttp.ClientSession(toy.url) as web:
        for _ in range(3):
            async with web.post(PATH, json={**ASK, "n": 2, "temperature": 0}) as reply:
                assert reply.status == 200
        async with web.post(PATH, json={**ASK, "n": "x"}) as reply:
            assert reply.status == 400
        async with web.get("/whatever/a/stranger/types") as reply:
            assert reply.status == 404
        async with web.post(PATH, json=LONG) as reply:
            reply.close()
        await toy.settled()
        while True:  # the handler of who left ends a moment later
            found = await numbers(web)
            if found["asyncspec_requests_total", "toy", "cancelled"]:
                break
        assert found["asyncspec_http_requests_total", "POST", PATH, "200"] == 3
        assert found["asyncspec_http_requests_total", "POST", PATH, "400"] == 1
        assert found["asyncspec_http_requests_total", "GET", "unknown", "404"] == 1
        assert found["asyncspec_requests_total", "toy", "length"] == 6
        assert found["asyncspec_requests_total", "toy", "cancelled"] == 1
        assert found["asyncspec_requests_running", "toy"] == 0
        assert found["asyncspec_generated_tokens_total", "toy"] >= 30
        assert found["asyncspec_prompt_tokens_total", "toy"] >= 30
        assert found["asyncspec_prompt_seconds_total", "toy"] > 0
        assert found["asyncspec_verdict_passes_total", "toy"] > 0
        assert found["asyncspec_queue_seconds_count", "toy"] == 7
        assert found["asyncspec_request_seconds_bucket", "+Inf", "toy"] == 7
        assert found["asyncspec_time_to_first_token_seconds_count", "toy"] >= 6
        assert found["asyncspec_node_device_seconds_total", "toy", "2", "verify"] > 0
        assert found["asyncspec_node_rows_total", "toy", "2", "verify"] >= 60
        assert found["asyncspec_node_resident_memory_bytes", "toy", "0", "draft"] > 1e6
        # A node that is gone has no numbers.
        await toy.cluster.stop(2)
        while ("asyncspec_node_sessions", "toy", "2", "verify") in await numbers(web):
            pass


async def test_the_state_of_the_cluster() -> None:
    async with Toy("link", stages=3) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json=LONG) as running:
            await toy.busy()
            async with web.get("/state") as reply:
                found = await reply.json()
            running.close()
        assert [node["rank"] for node in found["nodes"]] == [0, 1, 2, 3]
        assert [node["role"] for node in found["nodes"]] == ["draft"] + 3 * ["verify"]
        assert all(node["sessions"] == 1 for node in found["nodes"])
        assert any(node["slots"] for node in found["nodes"][1:])
        layers = [node["layers"] for node in found["nodes"][1:]]
        assert layers[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(layers))
        peers = {link["peer"] for link in found["nodes"][0]["links"]}
        assert peers == {1, 2, 3}
        await toy.settled()


@pytest.mark.parametrize("over", ["node", "link"])
@pytest.mark.parametrize(
    "says", [{}, {"temperature": 1.5}, {"temperature": 0}, {"top_k": 0}, {"repetition_penalty": 1}]
)
async def test_a_request_gets_what_the_target_recommends(
    over: Literal["node", "link"], says: dict[str, float]
) -> None:
    """In place of what it does not say; penalties, which have to read all tokens, as well."""
    recommended: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.8}
    rules = replace(RULES, defaults=Defaults(**recommended))
    ask = {**ASK, "max_tokens": 20, "seed": 3, **says}
    async with Toy(over, rules=rules) as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**ask, "return_details": True}) as reply:
            (choice,) = (await reply.json())["choices"]
        async with web.get("/state") as reply:
            assert (await reply.json())["defaults"] == recommended
        await toy.settled()
    (submit,) = (
        msgspec.convert({**recommended, **ask}, CompletionRequest).call(RequestContext()).submits
    )
    assert (tuple(choice["token_ids"]), choice["text"]) == reference(submit)


async def _streamed(web: aiohttp.ClientSession, path: str, ask: dict[str, Any]) -> Any:
    """An answer's text, its tokens, the reason of its end, and its seed."""
    text, tokens, reason, seed = "", list[int](), None, None
    async with web.post(path, json={**ask, "stream": True, "return_details": True}) as reply:
        assert reply.status == 200
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            (choice,), seed = event["choices"], event["seed"]
            delta = choice.get("delta", choice)
            text += delta.get("content" if path == CHAT else "text") or ""
            tokens += choice["token_ids"]
            reason = choice["finish_reason"] or reason
    return text, tokens, reason, seed


@pytest.mark.parametrize("over", ["node", "link"])
@pytest.mark.parametrize(
    ("path", "ask"),
    [
        (PATH, {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, "stop": ["zzz"]}),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}),
    ],
)
async def test_an_answer_whose_stream_broke_off_goes_on(
    over: Literal["node", "link"], path: str, ask: dict[str, Any]
) -> None:
    async with Toy(over) as toy, aiohttp.ClientSession(toy.url) as web:
        text, tokens, reason, seed = await _streamed(web, path, ask)
        assert tokens
        for count in (1, len(tokens) // 2, len(tokens)):
            rest = {**ask, "seed": seed, "given_token_ids": tokens[:count]}
            assert await _streamed(web, path, rest) == (text, tokens[count:], reason, seed)
        await toy.settled()


@pytest.mark.parametrize(
    "wrong",
    [
        {"given_token_ids": [1], "n": 2},
        {"given_token_ids": [1], "prompt": ["a", "b"]},
        {"given_token_ids": [99]},
        {"given_token_ids": [-1]},
        {"given_token_ids": 1},
        {"given_token_ids": [1] * 9},
    ],
)
async def test_tokens_that_begin_no_answer(wrong: dict[str, Any]) -> None:
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.post(PATH, json={**ASK, **wrong}) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["param"].partition("[")[0]) == (400, "given_token_ids")
        await toy.settled()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/state"])
async def test_paths_that_need_a_key(path: str) -> None:
    async with Toy(keys=("k",)) as toy, aiohttp.ClientSession(toy.url) as web:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "k"}, 401),
            ({"Authorization": "Basic k"}, 401),
            ({"Authorization": "Bearer k2"}, 401),
            ({"Authorization": "Bearer k"}, 200),
            ({"Authorization": "bearer k"}, 200),
        ):
            async with web.get(path, headers=headers) as reply:
                assert reply.status == status
        for open_path in ("/health", "/", "/page/app.js"):
            async with web.get(open_path) as reply:
                assert reply.status == 200


@pytest.mark.parametrize("over", ["node", "link"])
@pytest.mark.parametrize("share_all", [False, True])
async def test_keys_do_not_share_prompt_prefixes(
    over: Literal["node", "link"], share_all: bool
) -> None:
    """``cached_tokens`` would tell one key what another key's prompt begins with."""
    prompt = "a prompt that only the first key knows, and that is long enough to be kept" * 2
    body = {**ASK, "prompt": prompt}
    async with (
        Toy(over, keys=("one", "other"), share_prefixes=share_all) as toy,
        aiohttp.ClientSession(toy.url) as web,
    ):
        for key, cached in (("one", False), ("other", share_all), ("other", True), ("one", True)):
            headers = {"Authorization": f"Bearer {key}"}
            async with web.post(PATH, json=body, headers=headers) as reply:
                usage = (await reply.json())["usage"]
            reported = usage["prompt_tokens_details"]["cached_tokens"]
            assert reported == (len(prompt) - 1 if cached else 0)


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_listening_addresses(host: str, written: str) -> None:
    try:
        sock = listen.bind(host, 0, whose="this test")
    except UserError as error:
        pytest.skip(str(error))
    async with Toy() as toy, HttpServer(toy.service, sock) as server:
        assert server.url == f"http://{written}:{server.port}"
        async with aiohttp.ClientSession(server.url) as web, web.get("/health") as reply:
            assert reply.status == 200


@pytest.mark.slow
async def test_draining() -> None:
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        asked: dict[str, Any] = {**LONG, "max_tokens": 300}
        async with web.post(PATH, json=asked) as running:
            hurry = asyncio.Event()
            draining = asyncio.create_task(toy.server.drain(hurry))
            while True:
                async with web.get("/ready") as reply:
                    if reply.status == 503:
                        break
            async with web.post(PATH, json=ASK) as reply:
                assert reply.status == 503
                assert "Retry-After" in reply.headers
            lines = [line async for line in running.content if line.startswith(b"data: ")]
        # What ran has come to its end, and only then the service does.
        assert lines[-1] == b"data: [DONE]\n"
        await draining


@pytest.mark.parametrize("hurried", [False, True])
async def test_draining_ends(hurried: bool) -> None:
    """What still runs then is told so: streams, those that wait, and those that still speak."""
    async with aiohttp.ClientSession() as web:
        async with Toy(drain_seconds=100 if hurried else 0.2) as toy:
            running = await web.post(toy.url + PATH, json=LONG)
            reading = asyncio.create_task(running.read())
            whole = {**LONG, "stream": False}
            waiting = asyncio.create_task(web.post(toy.url + PATH, json=whole))
            half = await asyncio.open_connection("127.0.0.1", toy.port)
            half[1].write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            )
            half[1].write(b"Content-Type: application/json\r\n\r\n{")
            while toy.service.concurrency.taken < 2 or toy.service.shutdown.running < 3:
                await asyncio.sleep(0)  # a node without links answers at once
                await toy.engine.nodes()
            hurry = asyncio.Event()
            draining = asyncio.create_task(toy.server.drain(hurry))
            if hurried:
                hurry.set()
            await draining
        reported = [line for line in (await reading).split(b"\n\n") if line.startswith(b"data: ")][
            -1
        ]
        assert "stopping" in json.loads(reported[6:])["error"]["message"]
        async with await waiting as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) > 0
            assert (await reply.json())["error"]["code"] == "unavailable"
        assert (await half[0].readline()).startswith(b"HTTP/1.1 503")
        half[1].close()


async def test_a_status_query_is_answered_when_a_node_is_lost_meanwhile() -> None:
    async with Toy("link", stages=2) as toy:
        await toy.settled()
        pending = asyncio.create_task(toy.engine.nodes())
        await asyncio.sleep(0)
        await toy.cluster.stop(2)
        ranks = [status.rank for status in await pending]
        assert ranks[:2] == [Rank(0), Rank(1)]


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_is_accepted_at_the_end_is_closed(turns: int) -> None:
    """Whether the loop had a turn for it or not."""
    sock = listen.bind("127.0.0.1", 0, whose="this test")
    service = Service(ServiceOptions(ApiKeys(())), pending=str)
    async with HttpServer(service, sock) as server:
        peer = socket.create_connection(("127.0.0.1", server.port))
        peer.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
    with peer, contextlib.suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""
