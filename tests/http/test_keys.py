"""Keys with names and limits: who gets a 429, when, and what is said of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec_nodes.http.api.answers import ChoiceBuffer, expected_tokens
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.keys import (
    ANYBODY,
    BROKEN_SECONDS,
    MOST_BROKEN,
    Caller,
    KeySettings,
    read_keys,
)
from asyncspec_nodes.node.host import LocalEngine
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.messages import Finished, Output, Submit
from toy_service import ENDLESS, Toy


def written(tmp_path: Path, text: str, encoding: str = "utf-8") -> Any:
    file = tmp_path / "keys"
    file.write_text(text, encoding=encoding)
    return read_keys(file)


def test_names_limits_and_hashes(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = written(tmp_path, f"one name=alice tokens=5  # hers\nsha256:{digest} concurrent=2\nx\n")
    names = [keys.check(f"Bearer {key}").name for key in ("one", "secret", "x")]
    assert names == ["alice", "key2", "key3"]
    assert len({keys.check(f"Bearer {key}").tenant for key in ("one", "secret", "x")}) == 3
    with pytest.raises(ApiError, match="not one of this service"):
        keys.check(f"Bearer sha256:{digest}")


def test_a_hash_in_upper_case_and_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest().upper()
    keys = written(tmp_path, f"one\nsha256:{digest}\n", "utf-8-sig")
    assert [keys.check(f"Bearer {key}").name for key in ("one", "secret")] == ["key1", "key2"]
    for key in (f"sha256:{digest}", f"sha256:{digest.lower()}"):
        with pytest.raises(ApiError, match="not one of this service"):
            keys.check(f"Bearer {key}")


def test_a_hash_that_is_none_is_no_key() -> None:
    with pytest.raises(UserError, match=r"--api-key \(ASYNCSPEC_API_KEY\): behind sha256: stand"):
        read_keys(None, ("sha256:1234",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("one\nsha256:" + "a" * 63, "line 2 of .*: behind sha256: stand the 64 hexadecimal"),
        ("sha256:" + "g" * 64, "line 1 of .*: behind sha256: stand the 64 hexadecimal"),
        ("SHA256:secret", "line 1 of .*: behind sha256: stand the 64 hexadecimal"),
        ("one nam=x", "line 1 of .*: Object contains unknown field `nam`; behind a key may stand"),
        ("one\ntwo tokens=many", "line 2 of .*: Expected `int`"),
        ("one tokens=-1", "a limit is a number from 0 on"),
        ("one name=", "a key's name is 1 to 64"),
        ("one name=a,b", "a key's name is 1 to 64"),
        ("one name=a\ntwo name=a", "two API keys in .* have one name"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        written(tmp_path, text)


@given(
    st.integers(1, 20),
    st.integers(0, 9),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4)), max_size=30),
)
def test_no_minute_has_more_than_twice_its_limit(
    requests: int, concurrent: int, asked: list[tuple[float, int]]
) -> None:
    """A full bucket and what comes in meanwhile; and who waits as told is admitted."""
    now = 0.0
    caller = Caller(KeySettings("k", concurrent, requests), "", lambda: now)
    admitted: list[tuple[float, int]] = []
    for pause, count in asked:
        now += pause
        try:
            with caller.admit(count):
                assert not concurrent or count <= concurrent
        except ApiError as error:
            if concurrent and count > concurrent:
                continue
            now += int(error.headers["Retry-After"])
            with caller.admit(count):
                pass
        admitted.append((now, count))
    for start, _ in admitted:
        within = [count for at, count in admitted if start <= at < start + 60]
        # One request may have more answers than a minute brings.
        assert sum(within) <= 2 * requests + 4


def test_tokens_are_a_debt_that_is_paid_back() -> None:
    now = 0.0
    caller = Caller(KeySettings("k", tokens=60), "", lambda: now)
    with caller.admit(1):
        caller.spend(100)
    with pytest.raises(ApiError, match="60 tokens a minute") as caught, caller.admit(1):
        pass
    assert caught.value.headers["Retry-After"] == "41"
    now = 41.0
    with caller.admit(1):
        pass


def test_over_http(tmp_path: Path) -> None:
    """Each API's own form, and names but no keys in metrics."""
    keys = written(tmp_path, "k-one name=alice concurrent=1\nk-two name=bob tokens=10\n")

    async def main() -> None:
        async with Toy(keys=keys) as toy:
            async with aiohttp.ClientSession(toy.url) as web:

                async def ask(key: str, path: str, **fields: Any) -> tuple[int, Any, Any]:
                    body = {"model": "toy", **fields}
                    headers = {"Authorization": f"Bearer {key}"}
                    async with web.post(path, json=body, headers=headers) as reply:
                        return reply.status, json.loads(await reply.read()), reply.headers

                long = {"prompt": "hello", "max_tokens": ENDLESS, "ignore_eos": True}
                running = asyncio.create_task(ask("k-one", "/v1/completions", **long))
                asyncio.get_running_loop().call_later(8, running.cancel)
                await toy.busy()
                said = [{"role": "user", "content": "hi"}]
                status, body, headers = await ask(
                    "k-one", "/v1/messages", messages=said, max_tokens=4
                )
                assert (status, headers["Retry-After"]) == (429, "1")
                assert body["type"] == "error"
                assert body["error"]["type"] == "rate_limit_error"
                status, body, _ = await ask("k-one", "/api/chat", messages=said, stream=False)
                assert (status, list(body)) == (429, ["error"])
                assert "1 answers at a time" in body["error"]
                status, body, _ = await ask("k-one", "/v1/chat/completions", messages=said)
                assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
                # Another key has places of its own, and pays for prompt and answer.
                status, body, _ = await ask("k-two", "/v1/completions", prompt="x" * 30)
                assert status == 200
                used = body["usage"]["total_tokens"]
                status, body, headers = await ask("k-two", "/v1/completions", prompt="x")
                assert (status, "10 tokens a minute" in body["error"]["message"]) == (429, True)
                assert int(headers["Retry-After"]) > 60
                headers = {"Authorization": "Bearer k-two"}
                async with web.get("/metrics", headers=headers) as reply:
                    text = await reply.text()
                running.cancel()
            assert 'asyncspec_key_requests_total{key="alice",status="429"} 3.0' in text
            assert f'asyncspec_key_tokens_total{{key="bob"}} {used}.0' in text
            assert "k-one" not in text

    asyncio.run(main())


@pytest.mark.parametrize(("count", "status"), [(2, 200), (3, 429), (5, 400)])
def test_more_answers_than_a_key_ever_has_are_no_matter_of_time(count: int, status: int) -> None:
    """A client that waits as told would ask again for ever."""
    caller = Caller(KeySettings("k", concurrent=4), "")
    with caller.admit(2):
        if status == 200:
            with caller.admit(count):
                return
        with pytest.raises(ApiError) as caught, caller.admit(count):
            pass
    assert caught.value.status == status
    assert caught.value.param == ("n" if status == 400 else None)
    assert ("Retry-After" in caught.value.headers) == (status == 429)


def test_what_prompts_will_take_is_taken_at_once() -> None:
    now = 0.0
    caller = Caller(KeySettings("k", tokens=60), "", lambda: now)
    with caller.admit(1, 50):
        with pytest.raises(ApiError) as caught, caller.admit(1, 20):
            pass
        assert caught.value.headers["Retry-After"] == "10"
        # It was less, as its end says.
        caller.spend(-30)
        with caller.admit(1, 20):
            pass
    # More than a minute brings is given to a key that has taken nothing.
    now = 60.0
    with caller.admit(1, 1000):
        pass


@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from(["stop", "length", "error", "cancelled", None]),
    st.dictionaries(st.sampled_from(["prompt_tokens", "sessions"]), st.integers(0, 9)),
)
def test_tokens_of_an_answer(
    expected: int, outputs: list[int], reason: str | None, stats: dict[str, int]
) -> None:
    answer = ChoiceBuffer(expected)
    for count in outputs:
        answer.add(Output(0, (1,) * count, ""))
    assert answer.used == expected + sum(outputs)
    if reason is None:
        answer.fail()
        assert answer.used == sum(outputs)
        return
    answer.add(Finished(0, reason, "", {name: float(value) for name, value in stats.items()}))
    computed = reason != "error" or stats.get("sessions")
    assert answer.used == sum(outputs) + (stats.get("prompt_tokens", 0) if computed else 0)


@given(st.text(), st.lists(st.integers(0, 9)))
def test_tokens_that_are_expected_of_a_prompt(text: str, ids: list[int]) -> None:
    ask = Submit(0, text, 1, seed=0, temperature=0, top_k=0, top_p=1)
    assert 4 * expected_tokens(ask) - 3 <= len(text.encode()) <= 4 * expected_tokens(ask)
    if ids:
        assert expected_tokens(replace(ask, prompt="", prompt_ids=tuple(ids))) == len(ids)


PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1] * 900}),
    ("/v1/completions", {"prompt": "x" * 3600}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3600}]}),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["left", "late"])
@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
async def test_prompts_of_answers_without_an_end_count(
    tmp_path: Path, path: str, prompt: dict[str, Any], ends: str
) -> None:
    keys = written(tmp_path, "k name=alice tokens=1000\n")
    ask = {**prompt, "max_tokens": ENDLESS, "ignore_eos": True, "stream": ends == "left"}
    # Enough to read the prompt first, on a busy machine as well.
    seconds = {"answer_seconds": 1.0} if ends == "late" else {}
    async with (
        Toy(keys=keys, **seconds) as toy,
        aiohttp.ClientSession(toy.url, headers={"Authorization": "Bearer k"}) as web,
    ):
        async with web.post(path, json=ask) as reply:
            assert reply.status == (200 if ends == "left" else 504)
            if ends == "left":
                await reply.content.readline()
            reply.close()
        await toy.settled()
        async with web.post(path, json=ask) as reply:
            assert reply.status == 429
            assert int(reply.headers["Retry-After"]) > 30


@pytest.mark.asyncio
async def test_what_the_service_cannot_do_costs_nothing(tmp_path: Path) -> None:
    """Else a client that tries until it can would reach its limit."""
    keys = written(tmp_path, "k name=alice tokens=1000\n")
    async with (
        Toy("link", keys=keys) as toy,
        aiohttp.ClientSession(toy.url, headers={"Authorization": "Bearer k"}) as web,
    ):
        refused = {"prompt": [1] * 2 * ENDLESS, "max_tokens": 1}  # longer than the context
        for _ in range(2):
            async with web.post("/v1/completions", json=refused) as reply:
                assert reply.status == 400
        await toy.cluster.stop(0)
        for _ in range(2):
            async with web.post("/v1/completions", json={"prompt": [1] * 900}) as reply:
                assert reply.status == 503


@given(st.lists(st.tuples(st.booleans(), st.floats(0, BROKEN_SECONDS / 2)), max_size=30))
def test_a_key_whose_requests_end_nodes_is_refused_for_a_while(
    steps: list[tuple[bool, float]],
) -> None:
    now, ends = 0.0, list[float]()
    caller = Caller(KeySettings("k"), "", lambda: now)
    for breaks, seconds in steps:
        now += seconds
        if sum(now - at < BROKEN_SECONDS for at in ends) >= MOST_BROKEN:
            with pytest.raises(ApiError, match=r"nodes have ended with \d requests") as caught:
                caller.admit(1).__enter__()
            assert (caught.value.status, caught.value.code) == (429, "breaks")
            assert "Retry-After" in caught.value.headers
            assert 0 < int(caught.value.headers["Retry-After"]) <= BROKEN_SECONDS
            continue
        with caller.admit(1):
            caller.blame(int(breaks))
        if breaks:
            ends.append(now)


def test_without_keys_nobody_is_refused_for_what_others_requests_end() -> None:
    ANYBODY.blame(MOST_BROKEN)
    with ANYBODY.admit(1):
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_ended_nodes_count_for_their_key(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Toy("node", keys=("k", "other")) as toy:

        async def broken(self: object, submit: Submit) -> AsyncIterator[Output | Finished]:
            yield Output(0, (1,), "a")
            yield Finished(0, "error", "the pipeline broke", {"new_tokens": 1.0}, BREAKS)

        monkeypatch.setattr(LocalEngine, "ask", broken)
        async with aiohttp.ClientSession(toy.url) as web:
            statuses = []
            for key in ["k"] * (MOST_BROKEN + 1) + ["other"]:
                body = {"model": "toy", "prompt": "a", "stream": stream}
                headers = {"Authorization": f"Bearer {key}"}
                async with web.post("/v1/completions", json=body, headers=headers) as reply:
                    await reply.read()
                    statuses.append(reply.status)
    before = 200 if stream else 422
    assert statuses == [before] * MOST_BROKEN + [429, before]
