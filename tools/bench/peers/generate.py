"""Hugging Face ``generate`` on one device, in three ways, in a process with the whole model."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncspec.core.errors import ClusterError
from tools.bench.peers.peer import Answer
from tools.testbed.bed import Bed

WAYS = ("plain", "assistant", "lookup")
CHILD = Path(__file__).with_name("generate_child.py")


class Whole:
    """A process of its own on a device of a bed. Made by ``Whole.start``."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    @contextmanager
    def start(
        cls, bed: Bed, device: int, target: Path, draft: Path, folder: Path, torch_device: str
    ) -> Iterator[Whole]:
        """With as many threads as its device has cores, one at least; ended with the context. What
        it complains of goes to a file in ``folder``."""
        threads = math.ceil(bed.description.device[device].cpu or 1)
        command = [sys.executable, "-P", str(CHILD), str(target), str(draft), str(threads)]
        command.append(torch_device)
        log = folder / f"generate-{device}.log"
        with log.open("wb") as stderr:
            process = bed.start(
                device,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            yield cls(process, log)
        finally:
            process.kill()
            process.communicate()

    async def ask(self, prompt: str, tokens: int, way: str) -> Answer:
        """Timed in the process itself, tokenizer included. Raises ``ClusterError``."""
        request = json.dumps({"prompt": prompt, "tokens": tokens, "way": way})
        # A thread waits: meanwhile our own cluster's links want to be heard.
        line = await asyncio.to_thread(self._exchange, request)
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise ClusterError(f"generate has failed: {said[-1] if said else 'it said nothing'}")
        reply: dict[str, Any] = json.loads(line)
        ids = tuple(reply["token_ids"])
        return Answer(len(ids), reply["seconds"], ids, reply["text"])

    def _exchange(self, request: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()


class Generate:
    """One way of such a process. ``devices``: whose quota it has, in words."""

    def __init__(self, whole: Whole, way: str, devices: str, cores: float | None) -> None:
        self.name = generate_name(way, devices)
        self.cores = cores
        # With drafts several rows are verified in one pass, which rounds otherwise.
        self.exact = way == "plain"
        self._whole = whole
        self._way = way

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """See ``Peer``."""
        return await self._whole.ask(prompt, tokens, self._way)


ONE, ALL = "one device", "all devices"


def generate_name(way: str, devices: str) -> str:
    """As the table shows it."""
    return f"generate: {way}, {devices}"


BASE = generate_name("plain", ONE)
"""What every ratio is to."""
