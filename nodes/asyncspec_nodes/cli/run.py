"""``asyncspec run``: start or find a cluster, ask it, print, compare, stop everything."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from asyncspec.backend.threads import set_thread_count
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli import run_options
from asyncspec_nodes.cli.run_options import RunOptions
from asyncspec_nodes.cli.run_output import JsonPrinter, Printer, TextPrinter
from asyncspec_nodes.client.answers import Answer, answer_all
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.remote import ClusterAddress, connect
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import print_notice
from asyncspec_nodes.console.signals import until_signal
from asyncspec_nodes.local.cluster import RESTART_STAGES, LocalCluster
from asyncspec_nodes.local.progress import Progress, progress_display
from asyncspec_nodes.reference.check import Comparison, Question, check

Start = Callable[[Config, Progress, Path | None], LocalCluster]
"""How a cluster is made: whom to tell how far it is, and where its logs go."""


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``; signals end in ``KeyboardInterrupt``."""
    options = run_options.read_arguments(arguments)
    return asyncio.run(until_signal(Run(options).work()))


def here(config: Config, progress: Progress, logs: Path | None) -> LocalCluster:
    """A cluster on this machine, whose verify nodes and sources are started again if they die."""
    return LocalCluster(config, progress, logs, restarts=RESTART_STAGES, notify=print_notice)


class Run:
    """One invocation. ``start``: how its own cluster is made, where it needs one."""

    def __init__(self, options: RunOptions, start: Start = here) -> None:
        self._options = options
        self._start = start
        many = options.many
        self._printer: Printer = (
            JsonPrinter(many=many, checked=options.check)
            if options.json
            else TextPrinter(many=many)
        )
        self._answers: list[Answer] = []
        path = options.trace
        self._trace = None if path is None else TraceWriter(path, title=_title(options))

    async def work(self) -> int:
        """Exit code."""
        where = self._options.where
        try:
            await (self._remote(where) if isinstance(where, ClusterAddress) else self._local(where))
        finally:
            self._printer.stop()
            if self._trace is not None:
                self._trace.close()
        checks = await self._check()
        alone = not self._options.many
        if alone and self._answers[0].error is not None:
            raise self._answers[0].error
        self._printer.end(self._answers, checks)
        if (line := cut_short(self._answers)) is not None:
            print_notice(line)
        wrong = [answer for answer in self._answers if answer.error is not None]
        if wrong:
            count = f"{len(wrong)} of {len(self._answers)} requests failed"
            kind = UserError if all(isinstance(a.error, UserError) for a in wrong) else ClusterError
            raise kind(f"{count}; the first error: {wrong[0].error}")
        return 0 if all(comparison.equal for comparison in checks) else 1

    async def _local(self, config: Config) -> None:
        if self._options.threads is not None:
            set_thread_count(self._options.threads)  # children inherit it
        async with AsyncExitStack() as stack:
            with progress_display(config.stages) as progress:
                cluster = await stack.enter_async_context(
                    self._start(config, progress, self._options.logs)
                )
            self._printer.begin(config.stages, cluster.guarantee)
            client = await Client.connect(*cluster.address, config.cluster.name)
            await _while_alive(cluster, self._ask(client))

    async def _remote(self, where: ClusterAddress) -> None:
        client = await connect(where)
        self._printer.begin(client.welcome.stages, "")
        await self._ask(client)

    async def _ask(self, client: Client) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            if self._trace is not None:
                # A cluster of our own is recorded from its start.
                last = 0.0 if isinstance(self._options.where, ClusterAddress) else -1.0
                await stack.enter_async_context(TraceDownload(client, self._trace, last=last))
            chat = self._options.chat
            await answer_all(
                client,
                self._options.prompts,
                self._options.submit,
                chat=client.welcome.chat_template if chat is None else chat,
                system=self._options.system,
                concurrency=self._options.concurrency,
                show=self._printer.show,
                done=self._done,
            )

    def _done(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._printer.done(answer)

    async def _check(self) -> list[Comparison]:
        where = self._options.where
        fine = all(answer.error is None for answer in self._answers)
        if not self._options.check or not fine or isinstance(where, ClusterAddress):
            return []
        return await check(where, [Question(a.submit, a.token_ids) for a in self._answers])


def _title(options: RunOptions) -> str:
    where = options.where
    stages = "" if isinstance(where, ClusterAddress) else f", {where.stages} stages"
    return f"{options.submit.policy or 'the default policy'}{stages}"


def cut_short(answers: Sequence[Answer]) -> str | None:
    """What is to be said of answers that end before --max-new-tokens, where the context does."""
    cut = [
        answer
        for answer in answers
        if answer.finish_reason == "length" and len(answer.token_ids) < answer.submit.max_new_tokens
    ]
    if not cut:
        return None
    which = "the answer ends" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers end"
    some = f"after {len(cut[0].token_ids)} tokens, " if len(cut) == 1 else ""
    most = cut[0].submit.max_new_tokens
    return f"{which} {some}where the target's context does, before --max-new-tokens {most}"


async def _while_alive(cluster: LocalCluster, asking: Coroutine[Any, Any, None]) -> None:
    """Ask, unless a node ends before: that is the error to report, whatever else it causes."""
    asked = asyncio.create_task(asking)
    watch = asyncio.create_task(cluster.watch())
    try:
        await asyncio.wait((asked, watch), return_when=asyncio.FIRST_COMPLETED)
        if asked.done() and isinstance(asked.exception(), ClusterError):
            # A link is often quicker to break than a process to be seen dead.
            await asyncio.wait((watch,), timeout=1.0)
        if watch.done() and (not asked.done() or asked.exception() is not None):
            raise watch.result()
        await asked
    finally:
        for task in (asked, watch):
            task.cancel()
        await asyncio.gather(asked, watch, return_exceptions=True)
