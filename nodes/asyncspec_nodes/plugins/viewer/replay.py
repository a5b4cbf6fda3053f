"""Replays a recording through the role machines and compares their effects.

Tensor handles are not recorded; numbers replace them, as machines only pass them on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.core import machine
from asyncspec.core.errors import InputProblem, UserError
from asyncspec.core.jobs import Job, SamplerOutput, TensorRows
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec.trace import records
from asyncspec.trace.recorder import effect_record
from asyncspec.trace.records import NodeRecord, Record, Step
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.source import SourceConfig, SourceMachine
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.errors import RemoteProtocolError


class Difference(Struct, frozen=True):
    """A step whose effects are not those of the recording."""

    rank: int
    number: int
    recorded: tuple[records.Effect, ...]
    replayed: tuple[records.Effect, ...]
    error: str = ""


class Replayed(Struct, frozen=True):
    """Result of one node's replay, which ends at the first difference."""

    rank: int
    steps: int
    difference: Difference | None = None


AnyMachine = DraftMachine | VerifyMachine | SourceMachine


def replay(
    lines: Iterable[Record], policies: Mapping[str, Policy] = POLICIES
) -> tuple[Replayed, ...]:
    """Replay every node of a trace. Raises ``UserError`` where the recording is not complete."""
    nodes: dict[int, NodeRecord] = {}
    steps: dict[int, list[Step]] = {}
    for line in lines:
        if isinstance(line, NodeRecord):
            nodes[line.rank] = line
        elif isinstance(line, Step):
            steps.setdefault(line.rank, []).append(line)
    return tuple(_replay(nodes[rank], steps.get(rank, []), policies) for rank in sorted(nodes))


def _replay(node: NodeRecord, steps: list[Step], policies: Mapping[str, Policy]) -> Replayed:
    if node.masked:
        raise UserError(
            f"rank {node.rank} was recorded without token ids, and such a recording cannot be "
            "replayed (asyncspec record --tokens keeps them)"
        )
    if not node.whole or any(step.number != i for i, step in enumerate(steps)):
        raise UserError(
            f"rank {node.rank} was not recorded from its first step on, or lines were lost; "
            "only a complete recording can be replayed (asyncspec run --trace makes one)"
        )
    player = Player(node, policies)
    for step in steps:
        if (difference := player.play(step)) is not None:
            return Replayed(node.rank, step.number + 1, difference)
    return Replayed(node.rank, len(steps))


def _machine(node: NodeRecord, policies: Mapping[str, Policy]) -> AnyMachine:
    try:
        if node.role == "draft":
            fields: dict[str, Any] = {**node.config, "policies": {}}
            config = msgspec.convert(fields, DraftConfig, strict=False)
            return DraftMachine(msgspec.structs.replace(config, policies=policies))
        if node.role == "source":
            return SourceMachine(msgspec.convert(node.config, SourceConfig))
        return VerifyMachine(msgspec.convert(node.config, VerifyConfig))
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error).sentence("setting")
        raise UserError(f"rank {node.rank} was recorded with other settings: {problem}") from None


class Player:
    """One node's machine, fed from a recording."""

    def __init__(self, node: NodeRecord, policies: Mapping[str, Policy] = POLICIES) -> None:
        self._machine: Any = _machine(node, policies)
        self._state = self._machine.initial()
        # Jobs in progress, by number.
        self._jobs: dict[int, Job] = {}
        self._issued = 0
        self._handles = count(1)
        # Arguments of the tasks under way, by name.
        self._arguments: dict[str, object] = {}

    def play(self, step: Step) -> Difference | None:
        """Feed one input; what differs, if anything does."""
        number, replayed = self._issued, []
        _, effects, error = self.feed(step)
        for effect in effects:
            replayed.append(_comparable(effect_record(effect, number, 0)))
            number += isinstance(effect, machine.Compute)
        if replayed == list(map(_comparable, step.effects)) and error == step.error:
            return None
        return Difference(step.rank, step.number, step.effects, tuple(replayed), error)

    def feed(self, step: Step) -> tuple[machine.Input, tuple[machine.Effect, ...], str]:
        """The input, its effects, and why it was refused if it was."""
        event = self._event(step.input)
        try:
            self._state, effects = self._machine.step(self._state, event, step.at)
        except RemoteProtocolError as refusal:
            return event, (), refusal.text
        for effect in effects:
            if isinstance(effect, machine.Compute):
                self._jobs[self._issued] = effect.job
                self._issued += 1
            elif isinstance(effect, machine.RunTask):
                self._arguments[effect.task] = effect.argument
        return event, effects, ""

    def _event(self, source: records.Input) -> machine.Input:
        match source:
            case records.ReceivedMessage(peer, message, tensor, seconds):
                handle = next(self._handles) if tensor else None
                return machine.Received(peer, message, handle, seconds)  # type: ignore[arg-type]
            case records.JobResult(job):
                result = self._result(source)
                return machine.Computed(self._jobs.pop(job), result, source.seconds, source.waited)
            case machine.Submitted(request):
                if request.policy not in self._machine.config.policies:
                    raise UserError(f"the recording has policy {request.policy}, unknown here")
                return source
            case records.TaskResult(task):
                if task not in self._arguments:
                    raise UserError(f"the recording has the end of a task {task} that never began")
                argument = self._arguments.pop(task)
                return machine.TaskDone(task, argument, TASKS[task](argument))
            case machine.PrefixRead(session, tokens) if tokens:
                rows = TensorRows(next(self._handles), tuple(range(tokens)))
                return machine.PrefixRead(session, tokens, (rows,))
            case _:
                return source

    def _result(self, source: records.JobResult) -> object:
        if source.parts:
            return tuple(map(self._result, source.parts))
        if source.expanded is not None:
            return source.expanded
        if source.tokens is None:
            return next(self._handles)
        scores = source.token_log_probs, source.prompt_logprobs
        if not source.has_features and not source.top_tokens and not any(scores):
            return source.tokens
        features = next(self._handles) if source.has_features else None
        return SamplerOutput(source.tokens, features, source.top_tokens, *scores)


def _comparable(effect: records.Effect) -> records.Effect:
    """Without byte counts, which the runtime adds."""
    match effect:
        case records.Sent() | records.Reported():
            return msgspec.structs.replace(effect, nbytes=0)
        case machine.Finish(stats=stats):
            compared = {name: value for name, value in stats.items() if name != "bytes_sent"}
            return msgspec.structs.replace(effect, stats=compared)
        case _:
            return effect
