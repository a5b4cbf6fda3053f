"""The official Python client, as it is: what it gets is what the target alone would have said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from msgspec.structs import replace
from openai.types import CompletionUsage

from asyncspec.backend import sampling
from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.api.parameters import seed_of_choice
from asyncspec_nodes.serving.text import find
from asyncspec_protocol.messages import Submit
from toy_service import CODEC, ENDLESS, MODEL, PIECES, RULES, Toy, ToyTokenizer, reference

pytestmark = pytest.mark.asyncio

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "seed": 7}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5}


def client(toy: Toy, **more: Any) -> Any:
    """The client; untyped, since requests are made of dictionaries here."""
    key = more.pop("api_key", "unused")
    return openai.AsyncOpenAI(base_url=f"{toy.url}/v1", api_key=key, max_retries=0, **more)


def chat_submits(fields: dict[str, Any]) -> tuple[Submit, ...]:
    return msgspec.convert({"model": "toy", **fields}, ChatRequest).call(RequestContext()).submits


def text_submits(fields: dict[str, Any]) -> tuple[Submit, ...]:
    return (
        msgspec.convert({"model": "toy", **fields}, CompletionRequest)
        .call(RequestContext())
        .submits
    )


def counted(usage: CompletionUsage | None) -> tuple[int, int, int]:
    """Prompt, completion and total tokens: what does not depend on when a draft arrived."""
    assert usage is not None
    assert usage.completion_tokens_details is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest_asyncio.fixture(params=["node", "link"])
async def toy(request: pytest.FixtureRequest) -> AsyncIterator[Toy]:
    async with Toy(request.param) as toy:
        yield toy


async def test_models(toy: Toy) -> None:
    async with client(toy) as ai:
        assert [model.id async for model in ai.models.list()] == ["toy"]
        assert (await ai.models.retrieve("toy")).owned_by == "asyncspec"
        with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
            await ai.models.retrieve("other")
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("more", [{"temperature": 0}, SAMPLED])
async def test_chat(toy: Toy, more: dict[str, Any]) -> None:
    (submit,) = chat_submits({**ASK, **more})
    tokens, text = reference(submit)
    async with client(toy) as ai:
        whole = await ai.chat.completions.create(model="toy", **ASK, **more)
        (choice,) = whole.choices
        assert choice.message.content == text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == ("length" if len(tokens) == 30 else "stop")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(tokens)
        assert whole.usage.prompt_tokens == len(CODEC.render(submit.chat))
        assert whole.usage.total_tokens == len(tokens) + whole.usage.prompt_tokens
        pieces, last = [], None
        options = {"stream_options": {"include_usage": True}}
        async for chunk in await ai.chat.completions.create(
            model="toy", stream=True, **options, **ASK, **more
        ):
            pieces += [c.delta.content or "" for c in chunk.choices]
            last = chunk
        assert "".join(pieces) == text
        assert last is not None
        assert counted(last.usage) == counted(whole.usage)
    await toy.settled()


async def test_a_stream_tells_how_much_of_its_prompt_has_been_read(toy: Toy) -> None:
    long: dict[str, Any] = {"prompt": "x" * 200, "max_tokens": 5, "temperature": 0}
    async with client(toy) as ai:
        whole = await ai.completions.create(model="toy", **long)
        text, reports = "", []
        stream = await ai.completions.create(
            model="toy", stream=True, extra_body={"return_progress": True}, **long
        )
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            if progress := getattr(chunk, "prompt_progress", None):
                reports.append(progress)
                assert not text
        assert text == whole.choices[0].text
    read = [one["processed"] for one in reports]
    assert read
    assert read == sorted(read)
    assert all(one["cache"] <= one["processed"] < one["total"] == 200 for one in reports)


async def test_an_answer_ends_with_timings_as_of_llama_cpp(toy: Toy) -> None:
    (submit,) = chat_submits({**ASK, "temperature": 0})
    tokens, _ = reference(submit)
    async with client(toy) as ai:
        whole = await ai.chat.completions.create(model="toy", temperature=0, **ASK)
        stream = await ai.chat.completions.create(model="toy", temperature=0, stream=True, **ASK)
        ends = [chunk.timings async for chunk in stream if hasattr(chunk, "timings")]
        (streamed,) = ends
        for found in (whole.timings, streamed):  # type: ignore[attr-defined]
            assert found["prompt_n"] + found["cache_n"] == len(CODEC.render(submit.chat))
            read = found["prompt_per_second"] * found["prompt_ms"] / 1e3
            assert read == pytest.approx(found["prompt_n"])
            assert found["predicted_n"] == len(tokens)
            decoded = found["predicted_per_second"] * found["predicted_ms"] / 1e3
            assert decoded == pytest.approx(len(tokens) - 1)
        assert whole.timings["cache_n"] == 0  # type: ignore[attr-defined]


async def test_completions_of_several_prompts(toy: Toy) -> None:
    ask = {"prompt": ["hello", "bye"], "n": 2, "max_tokens": 12, "seed": 3, "temperature": 0.8}
    submits = text_submits(ask)
    async with client(toy) as ai:
        whole = await ai.completions.create(model="toy", **ask)
        streamed = [""] * 4
        async for chunk in await ai.completions.create(model="toy", stream=True, **ask):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    want = [reference(submit) for submit in submits]
    assert [choice.text for choice in whole.choices] == [text for _, text in want]
    assert streamed == [text for _, text in want]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("hello") + len("bye")
    assert whole.usage.completion_tokens == sum(len(tokens) for tokens, _ in want)


@pytest.mark.parametrize("prompt", [[3, 4, 5], [[3, 4, 5], [1]]])
async def test_prompts_of_tokens(toy: Toy, prompt: Any) -> None:
    ask = {"prompt": prompt, "max_tokens": 9, "temperature": 0}
    async with client(toy) as ai:
        whole = await ai.completions.create(model="toy", **ask)
        assert [c.text for c in whole.choices] == [reference(s)[1] for s in text_submits(ask)]
        with pytest.raises(openai.BadRequestError, match="not in the vocabulary of 16"):
            await ai.completions.create(model="toy", prompt=[16])


@pytest.mark.slow
async def test_seeds(toy: Toy) -> None:
    """One seed is one text, the first of several answers is the only one's, and a seed that
    nobody chose is told, so that the answer can be had again."""
    # To their full length: two answers that end at once may well be equal.
    ask: dict[str, Any] = {**ASK, **SAMPLED, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    del ask["seed"]
    async with client(toy) as ai:
        first = await ai.chat.completions.create(model="toy", **ask)
        seed = first.seed
        again = await ai.chat.completions.create(model="toy", **ask, seed=seed, n=3)
        texts = [choice.message.content for choice in again.choices]
        assert texts[0] == first.choices[0].message.content
        for i, text in enumerate(texts):
            alone = await ai.chat.completions.create(
                model="toy", **ask, seed=seed_of_choice(seed, i)
            )
            assert alone.choices[0].message.content == text
        other = await ai.chat.completions.create(model="toy", **ask)
        assert other.seed != seed
        assert len(set(texts)) == 3


async def test_stop(toy: Toy) -> None:
    (submit,) = chat_submits({**ASK, "max_tokens": 200, "temperature": 1, "ignore_eos": True})
    _, text = reference(submit)
    stop = text[60:63]
    async with client(toy) as ai:
        whole = await ai.chat.completions.create(
            model="toy",
            stop=stop,
            temperature=1,
            extra_body={"ignore_eos": True},
            **{**ASK, "max_tokens": 200},
        )
    found = find(text, (stop,))
    assert found is not None
    assert whole.choices[0].message.content == text[: found.start]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens < 200


@pytest.mark.sampled(4)
@pytest.mark.parametrize("temperature", [0, 1.0])
async def test_log_probs(toy: Toy, temperature: float) -> None:
    ask = {**ASK, "logprobs": True, "top_logprobs": 3, "temperature": temperature}
    (submit,) = chat_submits(ask)
    tokens, _ = reference(submit)
    async with client(toy) as ai:
        whole = await ai.chat.completions.create(model="toy", **ask)
        said = whole.choices[0].logprobs
        streamed: list[Any] = []
        async for chunk in await ai.chat.completions.create(model="toy", stream=True, **ask):
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    streamed += choice.logprobs.content or []
        prompt = {"prompt": "hello", "logprobs": 2, "temperature": temperature, "seed": 7}
        text = (await ai.completions.create(model="toy", **prompt)).choices[0].logprobs
    assert said is not None
    assert said.content == streamed
    assert said.content is not None
    state = MODEL.read(CODEC.render(submit.chat))
    for token, entry in zip(tokens, said.content, strict=True):
        logits = MODEL.logits([state.hidden])
        ((best, log_probs),) = sampling.best_successors(logits, 3)
        assert bytes(entry.bytes or []) == PIECES[token]
        assert entry.logprob == pytest.approx(sampling.log_probs_of(logits, [token])[0])
        assert [bytes(top.bytes or []) for top in entry.top_logprobs] == [PIECES[t] for t in best]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(log_probs)
        state = MODEL.extend(state, token)
    assert text is not None
    assert len(text.tokens or []) == len(text.token_logprobs or []) == len(text.text_offset or [])
    for token, entry in zip(text.tokens or [], text.top_logprobs or [], strict=True):
        assert token in entry
        assert len(entry) in (2, 3)


ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": -2}, "max_tokens", "invalid_value"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"seed": 2**70}, "seed", "invalid_value"),
    ({"stop": [""]}, "stop", ""),
    ({"logit_bias": {"x": 1}}, "logit_bias", ""),
    ({"logit_bias": {"99": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "invalid_value"),
    ({"extra_body": {"min_tokens": 31}}, "min_tokens", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", ""),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format",
        "invalid_grammar",
    ),
    ({"extra_body": {"guided_regex": "["}}, "guided_regex", "invalid_grammar"),
    ({"extra_body": {"guided_choice": []}}, "guided_choice", "invalid_value"),
    ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs", "invalid_value"),
    (
        {"extra_body": {"guided_regex": "a", "policy": "lossy-top-p"}},
        "guided_regex",
        "invalid_grammar",
    ),
    ({"extra_body": {"guided_regex": "a", "grammar": "x"}}, "grammar", ""),
    ({"n": 3, "extra_body": {"best_of": 2}}, "best_of", ""),
    ({"top_logprobs": 2}, "top_logprobs", ""),
    ({"extra_body": {"stop_token_ids": [1]}}, "stop_token_ids", "unsupported_parameter"),
    ({"extra_body": {"policy": "best"}}, "policy", ""),
    ({"messages": []}, "messages", ""),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "chat_template"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
        "unsupported_value",
    ),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("change", "param", "code"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_name_the_parameter(
    change: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    async with Toy() as toy, client(toy) as ai:
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model="toy", stream=stream, **{**ASK, **change})
        assert caught.value.param == param
        assert (caught.value.code or "") == code
        assert caught.value.type == "invalid_request_error"


async def test_a_prompt_that_is_too_long() -> None:
    async with Toy(rules=replace(RULES, context_length=20)) as toy, client(toy) as ai:
        with pytest.raises(openai.BadRequestError, match="context is 20") as caught:
            await ai.completions.create(model="toy", prompt="x" * 20)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        # Where nobody has said how long, an answer is cut to what the context has room for.
        whole = await ai.completions.create(
            model="toy", prompt="x" * 15, extra_body={"ignore_eos": True}
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        assert whole.choices[0].finish_reason == "length"


@pytest.mark.slow
async def test_a_limit_beyond_the_context_is_the_room_that_is_left() -> None:
    """Completions and chats, by either name: agents always ask for tens of thousands."""
    async with Toy(rules=replace(RULES, context_length=60)) as toy, client(toy) as ai:
        everything: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
        messages: Any = [{"role": "user", "content": "x"}]
        completion: Any = partial(ai.completions.create, model="toy", prompt="x" * 15)
        chat: Any = partial(ai.chat.completions.create, model="toy", messages=messages)
        whole = await chat(**everything)
        assert whole.choices[0].finish_reason == "length"
        room = whole.usage.completion_tokens
        for ask, name, most in (
            (completion, "max_tokens", 45),
            (chat, "max_tokens", room),
            (chat, "max_completion_tokens", room),
        ):
            for asked in (most, 32_000):
                cut = await ask(**{name: asked}, **everything)
                assert cut.usage.completion_tokens == most
                assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("over", ["node", "link"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_frees_everything(over: Literal["node", "link"], stream: bool) -> None:
    async with Toy(over, stages=3) as toy, client(toy) as ai:
        ask = {**ASK, "max_tokens": ENDLESS, "n": 3, "extra_body": {"ignore_eos": True}}
        pending = asyncio.create_task(ai.chat.completions.create(model="toy", stream=stream, **ask))
        await toy.busy()
        if stream:
            answer = await pending
            async for _ in answer:
                break
            await answer.close()
        else:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await toy.settled()
        assert toy.service.concurrency.taken == 0
        # The service goes on.
        assert (await ai.chat.completions.create(model="toy", **ASK)).choices[0].finish_reason


async def test_keys() -> None:
    async with Toy(keys=("one", "two")) as toy:
        for key in ("one", "two"):
            async with client(toy, api_key=key) as ai:
                await ai.models.list()
        for key in ("three", "onetwo", "on"):
            async with client(toy, api_key=key) as ai:
                with pytest.raises(openai.AuthenticationError):
                    await ai.chat.completions.create(model="toy", **ASK)


async def test_the_client_without_asyncio() -> None:
    def ask(url: str) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as untyped:
            ai: Any = untyped
            stream = ai.chat.completions.create(
                model="toy",
                temperature=0,
                stream=True,
                **ASK,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with Toy() as toy:
        (submit,) = chat_submits({**ASK, "temperature": 0})
        assert await asyncio.to_thread(ask, toy.url) == reference(submit)[1]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "regex", "regex": "( the| a)( x|b)+\\."}}, r"( the| a)( x|b)+\."),
    ({"structured_outputs": {"choice": [" a x", " thebb"]}}, " a x| thebb"),
    ({"guided_choice": ["b.b", "bb"]}, r"b\.b|bb"),
    ({"grammar": 'root ::= "b" [.]* " x"'}, r"b\.* x"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["b", "yb"]}},
            }
        },
        ' ?"y?b"',
    ),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("form", "pattern"), FORMS)
async def test_the_form_of_an_answer(
    form: dict[str, Any], pattern: str, temperature: float
) -> None:
    """With and without speculation it is one text, and what was asked for."""
    texts = set()
    async with Toy() as toy, client(toy) as ai:
        for policy in ("flowspec", "autoregressive", "pipedec"):
            ask = {**ASK, "max_tokens": 300, "temperature": temperature}
            whole = await ai.chat.completions.create(
                model="toy", **ask, extra_body={"policy": policy, **form}
            )
            texts.add((whole.choices[0].message.content or "").removesuffix("<end>"))
            assert whole.choices[0].finish_reason == "stop"
    (found,) = texts
    assert re.fullmatch(pattern, found)


async def test_biases_and_minimal_lengths() -> None:
    async with Toy() as toy, client(toy) as ai:
        ask = {"model": "toy", **ASK, "temperature": 1}
        only = await ai.chat.completions.create(**ask, logit_bias={"2": 100})
        assert only.choices[0].message.content == "b" * 30
        ends = await ai.chat.completions.create(**ask, logit_bias={"0": 100})
        assert ends.choices[0].message.content == "<end>"
        late = await ai.chat.completions.create(
            **ask, logit_bias={"0": 100}, extra_body={"min_tokens": 7}
        )
        assert late.usage is not None
        assert late.usage.completion_tokens == 8
        assert late.choices[0].finish_reason == "stop"


async def test_echo(toy: Toy) -> None:
    ask = {"prompt": ["hello", "b"], "max_tokens": 5, "seed": 1}
    async with client(toy) as ai:
        plain = await ai.completions.create(model="toy", **ask)
        whole = await ai.completions.create(model="toy", echo=True, best_of=1, **ask)
        want = [p + c.text for p, c in zip(ask["prompt"], plain.choices, strict=True)]  # type: ignore[call-overload]
        assert [choice.text for choice in whole.choices] == want
        streamed = [""] * 2
        async for chunk in await ai.completions.create(model="toy", echo=True, stream=True, **ask):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == want


async def test_the_best_of_several_answers(toy: Toy) -> None:
    ask: dict[str, Any] = {"model": "toy", "prompt": ["hello", "b"], "max_tokens": 5, "seed": 1}
    async with client(toy) as ai:
        every = await ai.completions.create(**ask, n=4, logprobs=0)
        best = await ai.completions.create(**ask, n=2, best_of=4)

        def likelihood(choice: Any) -> float:
            found: list[float] = choice.logprobs.token_logprobs
            return sum(found) / len(found)

        want = [
            choice.text
            for group in (every.choices[:4], every.choices[4:])
            for choice in sorted(group, key=likelihood, reverse=True)[:2]
        ]
        assert [choice.text for choice in best.choices] == want
        assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
        assert best.choices[0].logprobs is None
        assert counted(best.usage) == counted(every.usage)
        with pytest.raises(openai.BadRequestError, match="best_of"):
            await ai.completions.create(**ask, n=1, best_of=2, stream=True)


async def test_tokens_of_prompts(toy: Toy) -> None:
    """As a request with the prompt reads them; nothing is computed."""
    async with aiohttp.ClientSession() as session:

        async def ask(path: str, status: int = 200, **fields: Any) -> Any:
            async with session.post(f"{toy.url}{path}", json=fields) as response:
                assert response.status == status
                return await response.json()

        tokens = list(CODEC.encode("hello"))
        found = {"count": 5, "tokens": tokens}
        assert await ask("/tokenize", prompt="hello", model="toy") == found
        text = CODEC.decode(tokens)
        assert await ask("/detokenize", tokens=tokens) == {"prompt": text, "content": text}
        messages = [{"role": "user", "content": "hello"}]
        chat = CODEC.render(chat_submits({"messages": messages})[0].chat)
        assert (await ask("/tokenize", messages=messages))["tokens"] == list(chat)
        counted = await ask("/v1/messages/count_tokens", messages=messages)
        assert counted == {"input_tokens": len(chat)}
        wrong = await ask("/tokenize", 400, prompt="x", messages=messages)
        assert wrong["error"]["param"] == "prompt"
        assert (await ask("/detokenize", 400, tokens=[99]))["error"]["param"] == "tokens"
        async with session.get(f"{toy.url}/openapi.json") as response:
            described = await response.json()
        assert "/v1/chat/completions" in described["paths"]
        assert "ChatRequest" in described["components"]["schemas"]
    assert not any(node.sessions for node in await toy.settled())


class Infills(ToyTokenizer):
    """A tokenizer with marks for the text before and behind the middle."""

    def infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        return (3, *self.encode(prefix), 4, *self.encode(suffix), 5)


async def test_a_text_to_fill_in(toy: Toy) -> None:
    ask: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 5, "temperature": 0}
    async with client(toy) as ai:
        with pytest.raises(openai.BadRequestError, match="leave suffix out") as refused:
            await ai.completions.create(**ask, suffix="bye")
        assert refused.value.param == "suffix"
        with pytest.raises(openai.BadRequestError, match="prompts of text"):
            await ai.completions.create(**{**ask, "prompt": [1]}, suffix="bye")
        plain = await ai.completions.create(**ask, suffix="")
        assert plain.choices[0].text == reference(text_submits(ask)[0])[1]
    async with Toy(toy._over, tokenizer=Infills()) as infills, client(infills) as ai:
        filled = await ai.completions.create(**ask, suffix="bye")
        tokens = [3, *CODEC.encode("hello"), 4, *CODEC.encode("bye"), 5]
        same = await ai.completions.create(**{**ask, "prompt": tokens})
    assert filled.choices[0].text == same.choices[0].text
    assert filled.usage == same.usage
