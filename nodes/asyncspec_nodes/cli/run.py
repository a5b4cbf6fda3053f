"""``asyncspec run``: start or find a cluster, ask it, print, compare, stop everything."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.core.errors import ClusterError, UserError
from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli.run_options import RunOptions, read_arguments
from asyncspec_nodes.cli.run_options import add_arguments as add_arguments
from asyncspec_nodes.cli.terminal.run import Printer, cut_short, limited
from asyncspec_nodes.client.answers import (
    DEMO,
    Answer,
    Prompt,
    answer_all,
    prompt_tokens,
)
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.cluster.automatic import described
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import print_notice
from asyncspec_nodes.console.prompt_progress import PromptProgress
from asyncspec_nodes.console.signals import unless_failed, until_signal
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.local.cluster import LoadingSteps, LocalCluster
from asyncspec_nodes.node.reports import ReportSink
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_nodes.reference.check import CheckRequest, Comparison, check
from asyncspec_nodes.roles.stage_probe import NOT_PROBED

CANCEL_SECONDS = 2.0
"""The draft node's time to say how far the answers came that Ctrl-C ends."""

TOY = "the bundled model is a toy that tells children's stories; -m MODEL names another"

StartCluster = Callable[[Config, ReportSink, Path | None], LocalCluster]
"""Makes a cluster from its configuration, a receiver of its reports, and a directory for logs."""


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``; signals end in ``KeyboardInterrupt``."""
    options = read_arguments(arguments)
    asked = Run(options)
    code = asyncio.run(until_signal(asked.work(), asked.interrupt))
    if asked.interrupted:
        raise KeyboardInterrupt
    return code


def _to_check(answer: Answer) -> CheckRequest:
    """An answer to an unbounded request ends where the cluster's caches do."""
    submit = answer.submit
    if answer.finish_reason == "length":
        submit = replace(submit, max_new_tokens=len(answer.token_ids))
    return CheckRequest(submit, answer.token_ids)


def start_cluster(config: Config, progress: ReportSink, logs: Path | None) -> LocalCluster:
    """A cluster on this machine whose nodes are restarted."""
    return LocalCluster(config, progress, logs, restarts=RESTARTS, notify=print_notice)


class Run:
    """One invocation. ``start`` makes its own cluster, where it needs one."""

    def __init__(self, options: RunOptions, start: StartCluster = start_cluster) -> None:
        self._options = options
        self._start = start
        self._printer = Printer(
            many=options.many, json=options.json, checked=options.checked is not None
        )
        self._answers: list[Answer] = []
        self._probed = NOT_PROBED
        self._answering = False
        self._interrupt = asyncio.Event()
        self._waiting = Waiting("")
        self._progress = PromptProgress()
        where = options.where
        stages = f", {where.stages} stages" if isinstance(where, Config) else ""
        title = f"{options.submit.policy or 'the default policy'}{stages}"
        self._trace = None if options.trace is None else TraceWriter(options.trace, title)

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` has ended the answers."""
        return self._interrupt.is_set()

    def interrupt(self) -> bool:
        """End the answers where they are, with their statistics. Returns False where there are
        none, or for the second time."""
        if not self._answering or self.interrupted:
            return False
        self._interrupt.set()
        return True

    async def work(self) -> int:
        options, where = self._options, self._options.where
        try:
            if isinstance(where, Config):
                await self._local(where)
            else:
                engine = ReconnectingEngine(where.connect, waits=True, notify=print_notice)
                async with engine:
                    stages, service = engine.client.welcome.stages, options.service
                    if service is None:
                        self._printer.begin(stages, "")
                    else:
                        draft = described(service.config.draft)
                        self._printer.begin(stages, service.guarantee, draft)
                    await self._ask(engine, trace_from=0.0)
                    if options.checked is not None:
                        await self._probe(engine, options.checked, same_machine=False)
        finally:
            self._printer.stop()
            if self._trace is not None:
                self._trace.close()
        failed = [answer.error for answer in self._answers if answer.error is not None]
        checks: list[Comparison] = []
        if options.checked is not None and not (failed or self.interrupted):
            with Waiting("decodes sequentially, to compare"):
                checks = await check(
                    options.checked, [*map(_to_check, self._answers)], self._probed
                )
        if failed and not options.many:
            raise failed[0]
        self._printer.end(self._answers, checks)
        line = cut_short(self._answers)
        if line is None and not options.json:  # where "finish_reason" says it
            line = limited(self._answers)
        if line is not None:
            print_notice(line)
        if options.bundled and not options.json and not failed:
            print_notice(TOY)
        if failed:
            count = f"{len(failed)} of {len(self._answers)} requests failed"
            kind = UserError if all(isinstance(e, UserError) for e in failed) else ClusterError
            raise kind(f"{count}; the first error: {failed[0]}")
        return 0 if all(c.equal and not c.wrong_stages for c in checks) else 1

    async def _local(self, config: Config) -> None:
        async with AsyncExitStack() as stack:
            steps = LoadingSteps(config.stages)
            with steps.display():
                cluster = self._start(config, steps, self._options.logs)
                await stack.enter_async_context(cluster)
            self._printer.begin(config.stages, cluster.guarantee, described(config.draft))
            where = ClusterAddress(*cluster.address, config.cluster.name)
            engine = ReconnectingEngine(where.connect, waits=True)
            await stack.enter_async_context(engine)
            # A cluster of our own is recorded from its start.
            await unless_failed(self._ask(engine, trace_from=-1.0), cluster.watch())
            if self._options.checked is not None:
                probing = self._probe(engine, cluster.config, same_machine=True)
                await unless_failed(probing, cluster.watch())

    async def _probe(
        self, engine: ReconnectingEngine, config: Config, *, same_machine: bool
    ) -> None:
        """Have the stages read prompts and answers once more, to compare each by itself."""
        if self.interrupted or any(answer.error is not None for answer in self._answers):
            return
        # Here, as it imports arrays.
        from asyncspec_nodes.reference.probe import probe

        texts = [
            await prompt_tokens(engine, answer.submit) + answer.token_ids
            for answer in self._answers
        ]
        self._probed = await probe(config, engine.client.welcome, texts, same_machine=same_machine)
        if self._probed.error:
            print_notice(f"the stages are not compared one by one: {self._probed.error}")

    async def _ask(self, engine: ReconnectingEngine, trace_from: float) -> None:
        options, client = self._options, engine.client
        if options.bundled and not options.json and options.prompts == (Prompt((DEMO,)),):
            print_notice(f"no prompt is given; the bundled model continues: {DEMO}")
        async with AsyncExitStack() as stack:
            if self._trace is not None:
                is_alone = trace_from < 0  # others' clusters have others' requests
                download = TraceDownload(client, self._trace, last=trace_from, tokens=is_alone)
                await stack.enter_async_context(download)
            answering = answer_all(
                engine,
                options.prompts,
                replace(options.submit, progress=not options.many),
                chat=client.welcome.chat_template if options.chat is None else options.chat,
                system=options.system,
                concurrency=options.concurrency,
                show=self._show,
                done=self._done,
                read=lambda read, total: self._waiting.say(self._progress.line(read, total)),
            )
            await self._unless_interrupted(answering, engine)

    async def _unless_interrupted(
        self, answering: Coroutine[Any, Any, None], engine: ReconnectingEngine
    ) -> None:
        working = asyncio.create_task(answering)
        interrupt = asyncio.create_task(self._interrupt.wait())
        self._answering = True
        self._waiting = Waiting("reads the prompt" if not self._options.many else "answers")
        try:
            with self._waiting:
                await asyncio.wait((working, interrupt), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                engine.cancel()
                await asyncio.wait((working,), timeout=CANCEL_SECONDS)
            if working.done():
                working.result()
        finally:
            self._answering = False
            for task in (working, interrupt):
                task.cancel()
            await asyncio.gather(working, interrupt, return_exceptions=True)

    def _show(self, text: str) -> None:
        if not self._options.many:
            self._waiting.stop()
        self._printer.show(text)

    def _done(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._printer.done(answer)
