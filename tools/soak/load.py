"""Requests of all kinds: short and long prompts, schemas, tools, cancels, disconnects, nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from tools.bench.serving.prompts import opening
from tools.soak.machines import Machines

ANSWER_SECONDS = 600.0
CLIENTS = 4
PROMPTS = 12
"""So many different ones: each is asked again and again, and must get the same text."""

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WRONG = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}


class Load:
    """What came of the requests to a service."""

    def __init__(self, machines: Machines, web: aiohttp.ClientSession, seed: int) -> None:
        self._machines = machines
        self._web = web
        self._draws = random.Random(seed)
        self._texts: dict[str, str] = {}
        self.model = ""
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self._kinds: tuple[tuple[int, Callable[[int], Any]], ...] = (
            *((6, self._short), (2, self._long), (2, self._schema), (1, self._tools)),
            *((2, self._cancelled), (1, self._disconnected), (1, self._refused)),
        )

    async def client(self, until: Callable[[], bool]) -> None:
        """One request after another until it is time."""
        weights = [weight for weight, _ in self._kinds]
        while not until():
            ((_, kind),) = self._draws.choices(self._kinds, weights)
            name, number = kind.__name__.strip("_"), self._draws.randrange(PROMPTS)
            try:
                problem = await asyncio.wait_for(kind(number), ANSWER_SECONDS)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                self.ends[f"{name}: as it must be"] += 1
            elif problem.startswith(("503", "429")) and self._machines.excused:
                self.ends[f"{name}: refused while a machine was missing"] += 1
            else:
                self.ends[f"{name}: wrong"] += 1
                self.problems.append(f"{name} {number}: {problem[:300]}")

    async def _posted(self, path: str, **fields: Any) -> tuple[int, Any]:
        async with self._web.post(f"/v1/{path}", json={"model": self.model, **fields}) as reply:
            return reply.status, await reply.json()

    async def _whole(self, prompt: str, number: int, tokens: int) -> str:
        sampling = {"temperature": 0.8, "seed": number, "max_tokens": tokens}
        status, body = await self._posted("completions", prompt=prompt, **sampling)
        if status != 200:
            return f"{status}: {body}"
        text = body["choices"][0]["text"]
        if self._texts.setdefault(f"{number} {prompt}", text) != text:
            return f"another text than before: {text!r}"
        return ""

    async def _short(self, number: int) -> str:
        return await self._whole(opening(number), number, 32)

    async def _long(self, number: int) -> str:
        words = " ".join(opening(number + place) for place in range(40))
        return await self._whole(words[: 2000 + 200 * number], number, 24)

    async def _schema(self, number: int) -> str:
        status, body = await self._posted(
            "completions", prompt=opening(number), response_format=FORM, max_tokens=400, seed=number
        )
        return _is_answer(status, body, lambda choice: choice["text"])

    async def _tools(self, number: int) -> str:
        status, body = await self._posted(
            "chat/completions",
            messages=[{"role": "user", "content": opening(number)}],
            tools=[TOOL],
            tool_choice="required",
            max_tokens=400,
            seed=number,
        )
        if status == 400 and "template" in json.dumps(body):
            return ""  # the target has none
        arguments = lambda choice: choice["message"]["tool_calls"][0]["function"]["arguments"]  # noqa: E731
        return _is_answer(status, body, arguments)

    async def _cancelled(self, number: int) -> str:
        body = {"model": self.model, "prompt": opening(number), "max_tokens": 400, "stream": True}
        async with self._web.post("/v1/completions", json=body) as reply:
            if reply.status != 200:
                return f"{reply.status}: {await reply.text()}"
            for _ in range(self._draws.randrange(1, 12)):
                await reply.content.readline()
            reply.close()
        return ""

    async def _disconnected(self, number: int) -> str:
        """A client that leaves in the middle of its request."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._machines.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
        writer.write(head[: 10 * (1 + number)] if number % 2 else head + b'{"model":')
        await writer.drain()
        writer.close()
        return ""

    async def _refused(self, number: int) -> str:
        status, body = await self._posted("completions", prompt="x", response_format=WRONG)
        return "" if status == 400 else f"{status}: a wrong schema was taken: {body}"


def _is_answer(status: int, body: Any, text: Callable[[Any], str]) -> str:
    """Why an answer is not what the schema says; one that was cut is not looked at."""
    if status != 200:
        return f"{status}: {body}"
    choice = body["choices"][0]
    if choice["finish_reason"] == "length":
        return ""
    answer = json.loads(text(choice))
    return "" if sorted(answer) == ["n", "ok"] else f"not as the schema says: {answer}"
