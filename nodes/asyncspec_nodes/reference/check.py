"""``--check``: the same requests once more by the sequential decoder, in a process of its own:
the cluster's own stages, one after another, one token at a time. Where the cluster's have been
asked what each of them computes, these are compared as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from itertools import starmap, takewhile
from operator import eq
from typing import NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import StageBackend, StageSpec
from asyncspec.backend.reference import decode
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError
from asyncspec.placement.model import span_text
from asyncspec_nodes.cluster.checkpoints import read_template
from asyncspec_nodes.cluster.config import Config, layout
from asyncspec_nodes.cluster.placement import with_layers
from asyncspec_nodes.node import resources
from asyncspec_nodes.roles.stage_probe import NOT_PROBED, StageStates
from asyncspec_nodes.serving.requests import Refusal, ServingConfig, prepare, tokenize
from asyncspec_nodes.serving.text import answer_text
from asyncspec_protocol.messages import Submit

CHECK_SECONDS = 3600.0
"""Time-out of a check."""


class CheckRequest(Struct, frozen=True):
    """A request and the cluster's tokens."""

    submit: Submit
    token_ids: tuple[int, ...]


class Task(Struct, frozen=True):
    """The child's whole input, as JSON on its stdin."""

    config: Config
    requests: tuple[CheckRequest, ...]
    probed: StageStates = NOT_PROBED


class Comparison(Struct, frozen=True):
    """Result of one request."""

    equal: bool
    # Length of the longer answer, and tokens before the first difference.
    tokens: int
    same: int
    sentence: str
    # A sentence for each stage that computes prompt and answer wrongly.
    wrong_stages: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """For people."""
        return self.sentence, *self.wrong_stages


def compare(answer: Sequence[int], reference: Sequence[int]) -> Comparison:
    """Compare an answer's tokens with the sequential decoder's."""
    longest, same = (
        max(len(answer), len(reference)),
        sum(takewhile(bool, map(eq, answer, reference))),
    )
    equal = same == longest
    if equal:
        sentence = f"equal to the sequential decoder: {same} of {longest} tokens"
    else:
        ours, theirs = (str(x[same]) if same < len(x) else "the end" for x in (answer, reference))
        sentence = (
            f"differs from the sequential decoder at token {same + 1} of {longest}: "
            f"{ours}, not {theirs}"
        )
    return Comparison(equal=equal, tokens=longest, same=same, sentence=sentence)


async def check(
    config: Config, requests: Sequence[CheckRequest], probed: StageStates = NOT_PROBED
) -> list[Comparison]:
    """Decode in a child process. ``probed``: by request, what the cluster's stages made of prompt
    and answer. Raises ``ClusterError`` where that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "asyncspec_nodes.reference.check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await _answer(process, Task(config, tuple(requests), probed))
    except TimeoutError:
        raise ClusterError(f"the check took longer than {CHECK_SECONDS:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process, task: Task) -> list[Comparison]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # Stdin stays open: its end tells the child that this process has ended.
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
    process.stdin.close()
    if await process.wait() != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ClusterError(f"the sequential decoder failed: {lines[-1]}")
    return msgspec.json.decode(output, type=list[Comparison])


def main() -> NoReturn:
    """In the child: read a ``Task``, write its ``Comparison``s."""
    try:
        _run_task()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # a thread still reads stdin; skips torch's slow teardown


def _run_task() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    # The nodes' number of threads: another number may round differently.
    resources.set_local_threads(task.config)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(compare_all(task)))
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Exit when the parent closes our stdin."""
    sys.stdin.buffer.read()
    os._exit(1)


def _stage(config: Config, rank: int, span: tuple[int, int]) -> StageBackend:
    name = config.target_of(rank)
    backend = backend_of(name)
    model = backend.open(name, tokenizer=False)
    return backend.load(StageSpec(model, span, config.stage_options_of(rank)))


def _sentence(probed: StageStates, rank: int, deviation: object) -> str:
    first, end = (0, *probed.depths)[rank - 1 : rank + 1]
    host, port = probed.addresses[rank - 1]
    layers = span_text((first, end))
    return f"stage {rank} at {host}:{port} computes {layers} wrongly: {deviation}"


def compare_all(task: Task) -> list[Comparison]:
    """Decode all requests of a task."""
    # The parent, which asks, imports no arrays.
    from asyncspec_nodes.node.sources import grammars
    from asyncspec_nodes.reference.stages import wrong_stages

    config, target = with_layers(task.config), task.config.target
    backend = backend_of(target.path)
    model = backend.open(target.path)
    tokenizer = backend.load_tokenizer(model, read_template(target.chat_template))
    # The same layers per stage as in the cluster: the only difference is speculation.
    stages = [
        _stage(config, rank, span)
        for rank, span in enumerate(layout(config, model.info.layers), start=1)
    ]
    stages[-1].constrain(grammars(backend, model, tokenizer))
    serving = ServingConfig(
        context_length=config.limits.context_of(model.info.context_length),
        eos=frozenset(model.info.eos_token_ids),
        policy=config.draft.policy,
    )

    def one(check: CheckRequest) -> Comparison:
        request = prepare(check.submit, 0, serving, partial(tokenize, tokenizer))
        assert not isinstance(request, Refusal), request
        text = answer_text(tokenizer, check.submit, request.prompt)
        reference = decode(
            stages,
            request.prompt,
            request.max_new_tokens,
            request.stop_tokens,
            request.sampling,
            until=lambda token: text.push((token,)).stopped,
        )
        return compare(check.token_ids, reference)

    with contextlib.closing(tokenizer):
        comparisons = [one(given) for given in task.requests]
    for text, deviations in wrong_stages(stages, task.probed).items():
        sentences = tuple(starmap(partial(_sentence, task.probed), deviations.items()))
        comparisons[text] = replace(comparisons[text], wrong_stages=sentences)
    return comparisons


if __name__ == "__main__":
    main()
