"""The table that opens each machine: its events are the cases of the code, its handlers are called
there, and no simulated run has an effect that is not in it."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any, get_args

import pytest

from asyncspec.core.machine import Effect, Received, Send
from asyncspec_nodes.roles import source
from asyncspec_nodes.roles.draft import machine as draft
from asyncspec_nodes.roles.verify import machine as verify
from asyncspec_protocol.messages import Message
from fault_schedules import drawn, run

MACHINES = {draft: "DraftMachine", verify: "VerifyMachine", source: "SourceMachine"}
by_machine = pytest.mark.parametrize("module", MACHINES, ids=MACHINES.get)


def table(module: ModuleType) -> dict[str, tuple[set[str], set[str]]]:
    """By event: names of its handlers and of their effects. A row without an event goes on with the
    one above it."""
    rows: dict[str, tuple[set[str], set[str]]] = {}
    event = ""
    for line in (module.__doc__ or "").splitlines():
        if not line.startswith("| ") or "---" in line or line.startswith("| event"):
            continue
        name, handlers, effects = (cell.strip() for cell in line.strip("|").split("|"))
        event = name or event
        known_handlers, known_effects = rows.setdefault(event, (set(), set()))
        known_handlers.update(handlers.split())
        known_effects.update(effects.split())
    return rows


def cases(module: ModuleType) -> dict[str, set[str]]:
    """By event: what is called where the code matches it."""
    calls: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(ast.parse(getsource(module))):
        if not isinstance(node, ast.FunctionDef) or node.name not in ("step", "_received"):
            continue
        for case in (
            case for part in ast.walk(node) if isinstance(part, ast.Match) for case in part.cases
        ):
            called = {
                ast.unparse(part.func)
                for statement in case.body
                for part in ast.walk(statement)
                if isinstance(part, ast.Call)
            }
            for event in _events(case.pattern):
                calls[event] |= called
    return calls


def _events(pattern: ast.pattern) -> set[str]:
    """Names of the classes that a case is for: a message, rather than its ``Received``."""
    names = [
        ast.unparse(part.cls) for part in ast.walk(pattern) if isinstance(part, ast.MatchClass)
    ]
    if names[:1] == ["Received"]:
        return set(names[1:])
    if names[:1] == ["Computed"]:
        return {"Computed"}
    return set(names)


@by_machine
def test_every_event_is_in_the_table_and_its_handlers_are_called(module: ModuleType) -> None:
    rows, calls = table(module), cases(module)
    events = {event for event in rows if not event.startswith("any")}
    assert events == calls.keys()
    for event in events:
        handlers = rows[event][0]
        assert handlers, event
        assert handlers <= calls[event], event


@pytest.fixture(scope="module")
def observed() -> dict[ModuleType, dict[str, set[str]]]:
    """By machine and event: effects of simulated runs with faults."""
    seen: dict[ModuleType, dict[str, set[str]]] = {module: defaultdict(set) for module in MACHINES}

    def watched(module: ModuleType, step: Any) -> Any:
        def stepped(machine: Any, state: Any, event: Any, now: float) -> Any:
            after, effects = step(machine, state, event, now)
            name = type(event.message if isinstance(event, Received) else event).__name__
            seen[module][name].update(
                type(effect.message if isinstance(effect, Send) else effect).__name__
                for effect in effects
            )
            return after, effects

        return stepped

    with pytest.MonkeyPatch.context() as patch:
        for module, name in MACHINES.items():
            machine = getattr(import_module(module.__name__), name)
            patch.setattr(machine, "step", watched(module, machine.step))
        for seed in range(60):
            run(drawn(seed))
    return seen


@by_machine
def test_no_effect_is_missing_in_the_table(
    module: ModuleType, observed: dict[ModuleType, dict[str, set[str]]]
) -> None:
    rows = table(module)
    always = {effect for event in rows if event.startswith("any") for effect in rows[event][1]}
    assert len(observed[module]) > 5, "else the runs say little"
    for event, effects in observed[module].items():
        assert effects <= rows[event][1] | always, event


@by_machine
def test_effects_are_called_by_their_names(module: ModuleType) -> None:
    names = {kind.__name__ for kind in (*get_args(Effect), *get_args(Message))}
    for event, (_, effects) in table(module).items():
        assert effects <= names - {"Send"}, event
