"""An HTTP service whose engine writes one text."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from asyncspec.actor.inbox import Event
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Finished, Output, Status, Submit

KEY = "sk-test"
STATS = {"prompt_tokens": 7.0, "new_tokens": 5.0, "shared_tokens": 2.0, "hits": 3.0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = f"<think>\nRome, then.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
USER: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]


class ScriptedEngine:
    """Writes one text, in pieces of a few characters, and keeps what it is asked."""

    def __init__(self, said: str, facts: ChatFacts) -> None:
        self.said, self.facts = said, facts
        self.asked: list[Submit] = []
        # How its answers end.
        self.reason, self.stop = "stop", ""
        # When its prompts have been read.
        self.read = asyncio.Event()
        self.read.set()

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        self.asked.append(submit)
        await self.read.wait()
        for i in range(0, len(self.said), 5):
            await asyncio.sleep(0)
            if not submit.prompt_only:
                counts: Any = {} if i else {"prompt_tokens": 7, "shared_tokens": 2}
                yield Output(submit.request, (i,), self.said[i : i + 5], **counts)
        if submit.prompt_only:
            yield Output(submit.request, tuple(range(0, len(self.said), 5)), self.said)
        yield Finished(submit.request, self.reason, "", STATS, stop=self.stop)

    async def nodes(self) -> tuple[Status, ...]:
        facts = self.facts
        status = Status(0, 0, "draft", (0, 0), 0.0, 0.0, 0, 0, 0, 0)  # type: ignore[arg-type]
        return (
            replace(
                status,
                tool_syntax=facts.syntax,
                takes_tools=facts.takes_tools,
                reasoning=facts.reasoning,
                template_options=facts.options,
                context_length=4096,
            ),
        )

    @property
    def chat(self) -> Any:
        """The last conversation, as the template gets it."""
        return json.loads(self.asked[-1].chat)


QWEN = ChatFacts("hermes", True, "tags", ("enable_thinking",))


@asynccontextmanager
async def serving(
    said: str = SAID,
    facts: ChatFacts = QWEN,
    models: Sequence[str] = ("toy",),
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> AsyncIterator[tuple[str, Any]]:
    engine = ScriptedEngine(said, facts)
    service = Service(ServiceOptions(ApiKeys([KEY]), limits=limits), pending=str)
    service.serve(engine, *models)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    async with HttpServer(service, sock) as server:
        yield server.url, engine
