"""Which answers the clients' service dictates, and that the table has every client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Output, Submit
from asyncspec_protocol.sampling import Constraint
from scripted_engine import ScriptedEngine
from tools.bench.docs.results import load
from tools.clients.catalogue import CAPABILITIES, CLIENTS
from tools.clients.command import RESULTS, main
from tools.clients.dictation import (
    ANSWER,
    BLOCK,
    DONE,
    QUESTION,
    TASK,
    DictatingEngine,
    calls,
    dictated,
)

FOLDER = Path("/there")
END = 2


def asked(text: str, tools: tuple[str, ...] = (), taken: int = 0, grammar: str = "") -> Submit:
    turn = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "ok"}]
    messages = [{"role": "user", "content": text}, *turn * taken]
    chat: Any = {"messages": messages, "tools": [{"function": {"name": name}} for name in tools]}
    return Submit(
        request=1,
        prompt="",
        max_new_tokens=99,
        seed=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        chat=json.dumps(chat if tools else messages),
        constraint=Constraint(grammar),
    )


@pytest.mark.parametrize("name", calls(FOLDER))
def test_a_task_is_carried_out_call_by_call(name: str) -> None:
    steps = calls(FOLDER)[name]
    tools = ("unrelated", *(called for called, _ in steps))
    for taken, (called, arguments) in enumerate(steps):
        text = dictated(asked(TASK, tools, taken), FOLDER)
        assert text is not None
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call == {"name": called, "arguments": arguments}
    assert dictated(asked(TASK, tools, len(steps)), FOLDER) == DONE
    assert dictated(asked(QUESTION, tools), FOLDER) == ANSWER


def test_answers_without_tools() -> None:
    assert dictated(asked(QUESTION), FOLDER) == ANSWER
    assert dictated(asked(f"<<<<<<< SEARCH {TASK}"), FOLDER) == BLOCK
    assert dictated(asked(QUESTION, grammar="start: x"), FOLDER) == '{"city": "Rome"}'
    assert dictated(replace(asked(QUESTION), chat="", prompt=QUESTION), FOLDER) is None


@pytest.mark.asyncio
async def test_the_model_writes_the_end() -> None:
    engine = ScriptedEngine(ANSWER, ChatFacts())
    dictating = DictatingEngine(engine, lambda text: list(text.encode()), END, FOLDER)
    events = [event async for event in dictating.ask(asked(QUESTION))]
    assert "".join(event.text for event in events if isinstance(event, Output)) == ANSWER
    (submit,) = engine.asked
    assert bytes(submit.given).decode() == ANSWER
    assert submit.constraint.logit_bias == ((END, 100.0),)


def test_the_table_has_every_client() -> None:
    rows = load(RESULTS).tables["clients"].rows
    assert [row[0] for row in rows] == [client.name for client in CLIENTS]
    for client, row in zip(CLIENTS, rows, strict=True):
        shown = {name for check in client.checks for name in check.capabilities}
        cells = dict(zip(CAPABILITIES, row[-len(CAPABILITIES) :], strict=True))
        assert {name for name, cell in cells.items() if cell != "-"} >= shown


def test_a_client_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt"]) == 2
    assert "there is no client 'gpt'" in capsys.readouterr().err
