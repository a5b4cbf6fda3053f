"""What the model is made to write: a model small enough for this writes no calls by itself."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.actor.inbox import Event
from asyncspec_nodes.http.streaming import EngineClient
from asyncspec_protocol.messages import Output, Status, Submit

TASK = "In greeting.txt, replace Hello by Goodbye."
QUESTION = "What is the capital of Italy?"
ANSWER = "Rome is the capital of Italy."
DONE = "The greeting is replaced."
FORM = {"city": "Rome"}
FILE = "greeting.txt"
OLD, NEW = "Hello", "Goodbye"
TEXT = "{}, world."
"""The file's line before and after."""

BLOCK = "\n".join(
    (
        FILE,
        "```",
        "<<<<<<< SEARCH",
        TEXT.format(OLD),
        "=======",
        TEXT.format(NEW),
        ">>>>>>> REPLACE",
        "```",
    )
)
"""An edit as aider reads it."""

PIECE = 6
"""Characters that come at a time."""

Call = tuple[str, Mapping[str, Any]]


def calls(folder: Path) -> Mapping[str, Sequence[Call]]:
    """The calls that carry out ``TASK`` in ``folder``, by the name of the tool that edits."""
    path, sed = str(folder / FILE), f"sed -i s/{OLD}/{NEW}/ {FILE}"
    edit = {"file_path": path, "old_string": OLD, "new_string": NEW}
    camel = {"filePath": path, "oldString": OLD, "newString": NEW}
    return {
        # Qwen Code's, before its tool "edit".
        "read_file": (("read_file", {"file_path": path}), ("edit", edit)),
        "Edit": (("Read", {"file_path": path}), ("Edit", edit)),
        "edit": (("read", {"filePath": path}), ("edit", camel)),
        "exec_command": (("exec_command", {"cmd": sed}),),
        "shell_command": (("shell_command", {"command": sed}),),
        "replace": (("replace", {"path": FILE, "old": OLD, "new": NEW}),),
    }


def dictated(submit: Submit, folder: Path) -> str | None:
    """The answer to a request; None: the model's own."""
    if not submit.chat:
        return None
    chat = json.loads(submit.chat)
    messages, tools = (chat, []) if isinstance(chat, list) else (chat["messages"], chat["tools"])
    names = [tool.get("function", tool)["name"] for tool in tools or ()]
    if TASK in submit.chat:
        steps: Sequence[Call] = next((s for name, s in calls(folder).items() if name in names), ())
        if "final_answer" in names:  # smolagents' way to end
            steps = (*steps, ("final_answer", {"answer": DONE}))
        taken = sum(message["role"] == "assistant" for message in messages)
        if taken < len(steps):
            return _written(steps[taken])
        return BLOCK if "<<<<<<< SEARCH" in submit.chat else DONE
    if submit.constraint.grammar:
        return _written((names[0], FORM)) if names else json.dumps(FORM)
    return ANSWER


def _written(call: Call) -> str:
    name, arguments = call
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


class DictatingEngine:
    """Answers as ``engine``, which is given what to write (``Submit.given``)."""

    def __init__(
        self, engine: EngineClient, encode: Callable[[str], Sequence[int]], end: int, folder: Path
    ) -> None:
        """``encode``: an answer's tokens, behind which the model writes the token ``end``."""
        self._engine, self._encode, self._end, self._folder = engine, encode, end, folder

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events."""
        if not submit.prompt_only and (text := dictated(submit, self._folder)) is not None:
            constraint = replace(submit.constraint, logit_bias=((self._end, 100.0),))
            given = tuple(self._encode(text)[: submit.max_new_tokens])
            submit = replace(submit, given=given, constraint=constraint)
        async for event in self._engine.ask(submit):
            if not isinstance(event, Output) or submit.prompt_only:
                yield event
                continue
            # As a model writes: a client is to join them.
            for i in range(PIECE, len(event.text), PIECE):
                yield Output(event.request, (), event.text[i - PIECE : i])
            rest = (len(event.text) - 1) // PIECE * PIECE if event.text else 0
            yield replace(event, text=event.text[rest:])

    async def nodes(self) -> tuple[Status, ...]:
        """All nodes' state."""
        return await self._engine.nodes()
