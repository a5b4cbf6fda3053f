"""Prompts with their log-probabilities, as lm-eval and vLLM's clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from asyncspec.core.rng import stream
from toy_service import CODEC, MODEL, PIECES, Toy

pytestmark = pytest.mark.asyncio

PROMPT = [1 + stream(3, i) % 15 for i in range(150)]
"""More than two chunks."""


def rows(tokens: list[int]) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities [vocab] in the place of each token but the first, by the model alone."""
    state, found = MODEL.start(), []
    for token in tokens[:-1]:
        state = MODEL.extend(state, token)
        logits = np.float64(MODEL.logits([state.hidden])[0])
        found.append(logits - np.logaddexp.reduce(logits))
    return found


def text_of(token: int) -> str:
    return PIECES[token].decode(errors="backslashreplace")


async def post(web: aiohttp.ClientSession, path: str, **fields: Any) -> Any:
    async with web.post(path, json={"model": "toy", "temperature": 0, **fields}) as reply:
        return await reply.json()


def check_scores(said: dict[str, list[Any]], tokens: list[int], top: int) -> None:
    """That ``logprobs`` are those of the model alone."""
    assert said["tokens"] == [text_of(token) for token in tokens]
    assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
    ends = np.cumsum([len(text) for text in said["tokens"]])
    assert said["text_offset"] == [0, *ends[:-1]]
    for i, row in enumerate(rows(tokens), 1):
        assert said["token_logprobs"][i] == pytest.approx(row[tokens[i]], abs=1e-5)
        best = np.argsort(-row, kind="stable")[:top]
        shown = {text_of(token) for token in (*best, tokens[i])}
        assert said["top_logprobs"][i].keys() == shown
        assert max(said["top_logprobs"][i].values()) == pytest.approx(row.max(), abs=1e-5)


@pytest.mark.parametrize("over", ["node", "link"])
async def test_the_loglikelihood_of_lm_eval(over: Any) -> None:
    """The requests of its ``local-completions``, and how it reads the answers: a batch of prompts
    as tokens, each with one more token, of which none is read."""
    batch = [PROMPT, PROMPT[:70], [5], PROMPT]
    async with Toy(over) as toy, aiohttp.ClientSession(toy.url) as web:
        asked = {"prompt": batch, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        choices = (await post(web, "/v1/completions", **asked))["choices"]
        alone = await post(web, "/v1/completions", prompt=PROMPT[:70], max_tokens=1, logprobs=1)
    for prompt, choice in zip(batch, choices, strict=True):
        said = choice["logprobs"]
        (token,) = (i for i, piece in enumerate(PIECES) if text_of(i) == said["tokens"][-1])
        check_scores(said, [*prompt, token], 1)
        context = len(prompt) // 2 or 1
        scores, likeliest = said["token_logprobs"][context:-1], said["top_logprobs"][context:-1]
        best = [row.max() for row in rows(prompt)][context - 1 :]
        want = [row[t] for row, t in zip(rows(prompt), prompt[1:], strict=True)][context - 1 :]
        assert sum(scores) == pytest.approx(sum(want), abs=1e-3)
        greedy = [score == max(top.values()) for score, top in zip(scores, likeliest, strict=True)]
        assert greedy == [w == b for w, b in zip(want, best, strict=True)]
    # What is added is the same token as without echo.
    assert choices[1]["text"].endswith(alone["choices"][0]["text"])


async def test_prompts_alone() -> None:
    """``max_tokens`` 0, streamed or not, of text and of tokens."""
    text = "scored"
    tokens = list(CODEC.encode(text))
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        asked = {"max_tokens": 0, "logprobs": 2, "echo": True}
        whole = await post(web, "/v1/completions", prompt=text, **asked)
        same = await post(web, "/v1/completions", prompt=tokens, **asked)
        bare = await post(web, "/v1/completions", prompt=tokens, max_tokens=0, echo=True)
        none = await post(web, "/v1/completions", prompt=text, max_tokens=0)
        more = await post(web, "/v1/completions", prompt=tokens, n=2, seed=5, **asked)
        fields = {"model": "toy", "prompt": tokens, **asked, "stream": True}
        async with web.post("/v1/completions", json=fields) as reply:
            lines = [line[6:] async for line in reply.content if line.startswith(b"data: {")]
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == len(tokens) == whole["usage"]["total_tokens"]
    check_scores(whole["choices"][0]["logprobs"], tokens, 2)
    spelled = b"".join(PIECES[token] for token in tokens).decode(errors="replace")
    assert bare["choices"][0]["text"] == same["choices"][0]["text"] == spelled
    assert none["choices"][0]["text"] == ""
    for choice in (*same["choices"], *more["choices"]):
        assert choice["logprobs"] == whole["choices"][0]["logprobs"]
    first, last = (json.loads(line)["choices"][0] for line in lines)
    assert first["logprobs"] == whole["choices"][0]["logprobs"]
    assert (first["text"], last["finish_reason"]) == (spelled, "length")


async def test_an_answer_streamed_behind_its_prompt() -> None:
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        asked = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 1, "echo": True}
        whole = (await post(web, "/v1/completions", **asked))["choices"][0]
        fields = {"model": "toy", "temperature": 0, **asked, "stream": True}
        async with web.post("/v1/completions", json=fields) as reply:
            lines = [line[6:] async for line in reply.content if line.startswith(b"data: {")]
    pieces = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole["logprobs"]


async def test_prompt_logprobs_of_vllm() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        text = await post(web, "/v1/completions", prompt=PROMPT, max_tokens=2, prompt_logprobs=2)
        chat = await post(
            web, "/v1/chat/completions", messages=messages, max_tokens=2, prompt_logprobs=0
        )
    tokens = list(CODEC.render(json.dumps(messages)))
    for said, prompt, top in [
        (text["choices"][0]["prompt_logprobs"], PROMPT, 2),
        (chat["prompt_logprobs"], tokens, 0),
    ]:
        assert said[0] is None
        assert len(said) == len(prompt)
        for entry, row, token in zip(said[1:], rows(prompt), prompt[1:], strict=True):
            rank = 1 + int((row > row[token]).sum())
            best = {int(t): i for i, t in enumerate(np.argsort(-row, kind="stable")[:top], 1)}
            assert {int(t): one["rank"] for t, one in entry.items()} == best | {token: rank}
            for name, one in entry.items():
                assert one["logprob"] == pytest.approx(row[int(name)], abs=1e-5)
                assert one["decoded_token"] == text_of(int(name))
    assert text["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "given_token_ids": [3]}, "given_token_ids"),
        ({"echo": True, "given_token_ids": [3]}, "echo"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        error = (await post(web, "/v1/completions", prompt="x", **fields))["error"]
    assert error["param"] == param
