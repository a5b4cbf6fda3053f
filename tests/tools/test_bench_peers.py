"""The comparison with other engines: its sums, its arguments, its client, and one small run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from tools.bench.__main__ import main
from tools.bench.peers.comparison import LIKE, Comparison, Engine, read_engines
from tools.bench.peers.endpoint import Endpoint, events
from tools.bench.peers.generate import BASE
from tools.bench.peers.measure import ask_all
from tools.bench.peers.output import about
from tools.bench.peers.peer import Answer
from tools.bench.peers.ratios import differs, rate, standings
from tools.testbed.description import load

ANSWERS = st.builds(Answer, st.integers(1, 100), st.floats(0.01, 100))


@given(
    st.integers(1, 4).flatmap(
        lambda repeats: st.dictionaries(
            st.sampled_from(["base", "a", "b", "c"]),
            st.lists(st.lists(ANSWERS, min_size=2, max_size=2), min_size=repeats, max_size=repeats),
        ).filter(lambda found: "base" in found)
    )
)
def test_standings_are_sorted_by_ratios_within_repeats(
    found: dict[str, list[list[Answer]]],
) -> None:
    each = standings(found, dict.fromkeys(found, 0.4), "base")
    assert {one.name for one in each} == set(found)
    assert [one.ratio for one in each] == sorted((one.ratio for one in each), reverse=True)
    for one in each:
        pairs = zip(found[one.name], found["base"], strict=True)
        ratios = [rate(mine) / rate(base) for mine, base in pairs]
        assert (one.least, one.most) == (min(ratios), max(ratios))
        assert one.least <= one.ratio <= one.most
        if one.name == "base":
            assert one.ratio == one.least == one.most == 1


def test_a_ratio_is_the_median_of_repeats_not_the_ratio_of_medians() -> None:
    def repeats(*seconds: float) -> list[list[Answer]]:
        return [[Answer(8, s / 2), Answer(8, s / 2)] for s in seconds]

    found = {"base": repeats(1, 2, 4), "it": repeats(0.5, 2, 1)}
    (it, base) = standings(found, {"base": 0.4, "it": None}, "base")
    assert (it.name, it.ratio, it.least, it.most, it.tokens_per_second) == ("it", 2, 1, 4, 16)
    assert (it.cores, base.cores) == (None, 0.4)


def test_texts_differ_only_where_both_have_something() -> None:
    reference = Answer(3, 1.0, (5, 6, 7), "a fox")
    assert not differs(Answer(3, 1.0, (5, 6, 7)), reference)
    assert not differs(Answer(2, 1.0, (5, 6)), reference)
    assert differs(Answer(3, 1.0, (5, 6, 8)), reference)
    assert not differs(Answer(9, 1.0, text="a fox runs"), reference)
    assert differs(Answer(9, 1.0, text="a dog"), reference)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--endpoint", "vllm"], "--endpoint-model"),
        (["--endpoint-model", "m"], "--endpoint-model"),
        (["--endpoint", "vllm", "--endpoint-model", "m"], "NAME=URL"),
        (["--endpoint", "a=http://x", "--endpoint", "a=http://y", "--endpoint-model", "m"], "same"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--cpu", "0"], "--cpu is 0"),
        (["--stages", "9"], "9 stages are more than the target's 8 layers"),
        (["--target", "/nowhere"], "/nowhere"),
        (["--draft", "ngram"], "ngram"),
        (["--hidden", "16"], "hidden 16 is below"),
        (["--layers", "12"], "no multiple"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peers", *words]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench: ")]
    assert len(said) == 1
    assert complaint in said[0]


def test_one_model_goes_for_all_endpoints_or_one_for_each() -> None:
    named = ["a=http://x/v1/", "b=https://y/v1"]
    assert read_engines(named, ["m"]) == (
        Engine("a", "http://x/v1", "m"),
        Engine("b", "https://y/v1", "m"),
    )
    assert [engine.model for engine in read_engines(named, ["m", "n"])] == ["m", "n"]
    assert read_engines([], []) == ()
    with pytest.raises(UserError, match="3 given for 2"):
        read_engines(named, ["m", "n", "o"])


async def _lines(*lines: bytes) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


async def _events(*lines: bytes) -> list[dict[str, object]]:
    return [event async for event in events(_lines(*lines))]


def test_events_skip_what_is_no_data_and_end_at_done() -> None:
    stream = (b": alive\n", b"\n", b'data: {"a": 1}\r\n', b"event: x\n", b'data:{"b": 2}\n')
    found = asyncio.run(_events(*stream, b"data: [DONE]\n", b"data: nonsense\n"))
    assert found == [{"a": 1}, {"b": 2}]
    with pytest.raises(ClusterError, match="not an event"):
        asyncio.run(_events(b"data: nonsense\n"))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _ask(handler: Handler) -> Answer:
    """One answer of an engine that is this handler."""

    async def work() -> Answer:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            async with aiohttp.ClientSession() as session:
                engine = Engine("it", f"http://127.0.0.1:{port}/v1", "m")
                return await Endpoint(engine, session).answer("Once", 7)
        finally:
            await runner.cleanup()

    return asyncio.run(work())


def _streaming(*values: object) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        assert (asked["model"], asked["prompt"], asked["max_tokens"]) == ("m", "Once", 7)
        assert asked["temperature"] == 0
        assert asked["stream_options"] == {"include_usage": True}
        response = web.StreamResponse()
        await response.prepare(request)
        for value in values:
            data = b"data: " + json.dumps(value).encode() + b"\n\n"
            await response.write(data[:9])  # an event may come in pieces
            await response.write(data[9:])
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def test_an_endpoint_is_asked_in_a_stream_and_counts_by_its_usage() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    pieces = [{"choices": [{"text": text}], "usage": None} for text in (" upon", " a", " time")]
    answer = _ask(_streaming(*pieces, usage))
    assert (answer.count, answer.text, answer.token_ids) == (5, " upon a time", ())
    assert answer.seconds > 0


def test_a_failing_endpoint_is_one_line() -> None:
    async def refusing(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no model\nm"}, status=404)

    with pytest.raises(UserError, match=r"answers 404: .*no model"):
        _ask(refusing)
    with pytest.raises(ClusterError, match="out of memory"):
        _ask(_streaming({"error": "out of memory"}))
    with pytest.raises(ClusterError, match="usage"):
        _ask(_streaming({"choices": [{"text": " upon"}]}))


def test_an_endpoint_that_is_not_there_is_the_users_mistake() -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            await Endpoint(Engine("it", "http://127.0.0.1:1/v1", "m"), session).answer("Once", 7)

    with pytest.raises(UserError, match="cannot ask"):
        asyncio.run(work())


class Scripted:
    """A peer that says a list of tokens, and notes that it was asked."""

    cores = None

    def __init__(
        self, name: str, tokens: tuple[int, ...], log: list[str], *, exact: bool = False
    ) -> None:
        self.name = name
        self.exact = exact
        self._tokens = tokens
        self._log = log

    async def answer(self, prompt: str, tokens: int) -> Answer:
        self._log.append(f"{self.name} {prompt}")
        return Answer(tokens, 1.0, self._tokens[:tokens])


def _compare(*others: Scripted, base: Scripted) -> tuple[dict[str, list[list[Answer]]], object]:
    here = Path()
    comparison = Comparison(here, here, None, repeats=2, tokens=3, prompts=("p", "q"))
    return asyncio.run(ask_all([*others, base], comparison, lambda: None))


def test_peers_take_turns_and_other_texts_are_counted() -> None:
    log: list[str] = []
    base = Scripted(BASE, (1, 2, 3), log, exact=True)
    found, strays = _compare(
        Scripted("same", (1, 2, 3), log, exact=True), Scripted("other", (1, 2, 4), log), base=base
    )
    once = [f"{name} {prompt}" for prompt in "pq" for name in ("same", "other", BASE)]
    assert log == once * 2
    assert strays == {"other": 4}
    assert [[len(answers) for answers in repeats] for repeats in found.values()] == [[2, 2]] * 3


def test_only_the_same_sums_must_write_the_same_text() -> None:
    same = Comparison(BUNDLED_TARGET, BUNDLED_DRAFT, None, mode="exact", dtype="fp32")
    assert same.exact
    for other in ({"mode": "fast"}, {"dtype": "auto"}, {"quantize": "int4"}, {"device": "cuda"}):
        assert not structs.replace(same, **other).exact


def test_only_pipelines_have_the_latency() -> None:
    far = Comparison(BUNDLED_TARGET, BUNDLED_DRAFT, None, latency_ms=20)
    assert far.our_bed().network == structs.replace(load(LIKE).network, latency_ms=20)
    assert far.generate_bed().network.latency_ms == 0
    assert any("lan-1000 with 20 ms from any device" in line for line in about(far, None))


def test_our_own_other_text_ends_the_run() -> None:
    base = Scripted(BASE, (1, 2, 3), [], exact=True)
    with pytest.raises(AsyncSpecError, match="ours wrote another text"):
        _compare(Scripted("ours", (1, 2, 4), [], exact=True), base=base)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.processes
def test_a_small_run_ranks_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--no-enlarge --stages 1 --repeats 1 --tokens 4 --cpu 1 --network loopback --json"
    assert main(["peers", "--our-mode", "exact", "--our-dtype", "fp32", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    ratios = {peer["name"]: peer["ratio"] for peer in found["peers"]}
    assert ratios[found["base"]] == 1
    assert list(ratios.values()) == sorted(ratios.values(), reverse=True)
    assert {name.partition(":")[0] for name in ratios} == {"ours", "generate"}
    assert len(ratios) == 10
    assert not any("another text" in note for note in found["notes"])
