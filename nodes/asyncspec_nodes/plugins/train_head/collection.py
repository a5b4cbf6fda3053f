"""Fills a folder of shards with a target's answers, from where an interrupted run was."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.backend.base import ModelInfo, StageBackend
from asyncspec.backend.feature_shards import SHARD_BYTES, Collected, Shards
from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.errors import UserError, writing
from asyncspec_nodes.plugins.train_head.answers import Sample, answer_all
from asyncspec_nodes.plugins.train_head.prompts import Item, opening, read_items

TEMPERATURES = (0.0, 0.8)
"""Each prompt is answered at both."""

WRITTEN_TOKENS = 160
"""Tokens of a prompt that the target writes itself."""

FLUSH_SECONDS = 60.0

Report = Callable[[str], None]


class Reader(Struct, frozen=True):
    """A loaded target."""

    stage: StageBackend
    tokenizer: Tokenizer
    info: ModelInfo
    # Answers at a time.
    sessions: int


class Bounds(Struct, frozen=True):
    """How much is collected."""

    # Tokens of an answer.
    tokens: int
    # Bytes of all shards.
    disk: int
    seed: int


def own_prompts(reader: Reader, path: Path, count: int, seed: int, report: Report) -> list[Path]:
    """A file of prompts that the target wrote itself at temperature 1, as it does where a user's
    message, or a text, would begin. Raises ``UserError``."""
    if path.exists():
        return [path]
    start = opening(reader.tokenizer, next(iter(reader.info.eos_token_ids), 0))
    samples = (Sample(i, start, WRITTEN_TOKENS, 1.0, seed + i) for i in range(count))
    lines: list[bytes] = []
    key = "prompt" if reader.tokenizer.has_template else "text"
    stop = reader.info.eos_token_ids
    for written in answer_all(reader.stage, (), samples, stop, reader.sessions):
        if text := reader.tokenizer.decode(written.tokens[written.answer :]).strip():
            lines.append(msgspec.json.encode({key: text}) + b"\n")
        report(f"the target wrote {len(lines)} of {count} prompts")
    unfinished = path.with_suffix(".tmp")
    with writing(str(path)):
        unfinished.write_bytes(b"".join(lines))
        unfinished.replace(path)
    return [path]


def collect(
    reader: Reader, shards: Shards, items: Sequence[Item], bounds: Bounds, report: Report
) -> int:
    """Answer what is not answered yet, until all is or the disk's bound is reached: prompts that
    were left out, as the template refuses them or they are too long."""
    done = {text.number for _, text in shards.texts()}
    left_out = 0

    def samples() -> Iterator[Sample]:
        nonlocal left_out
        order = [*range(len(items))]
        random.Random(bounds.seed).shuffle(order)
        for index in order:
            numbers = [index + i * len(items) for i in range(len(TEMPERATURES))]
            if all(number in done for number in numbers):
                continue
            prompt = _prompt(items[index], reader)
            if not prompt:
                left_out += 1
                continue
            tokens = min(bounds.tokens, reader.info.context_length - len(prompt))
            for number, temperature in zip(numbers, TEMPERATURES, strict=True):
                if number not in done:
                    yield Sample(number, prompt, tokens, temperature, bounds.seed + number)

    store = _Store(shards, bounds.disk, len(items) * len(TEMPERATURES) - len(done), report)
    answers = answer_all(
        reader.stage,
        shards.notes.depths,
        samples(),
        reader.info.eos_token_ids,
        reader.sessions,
        store.drawn,
    )
    try:
        for answer in answers:
            if not store.add(answer):
                break
    finally:
        answers.close()
        store.flush()
    return left_out


def _prompt(item: Item, reader: Reader) -> tuple[int, ...]:
    """Empty where it cannot be answered."""
    try:
        prompt = item.tokens(reader.tokenizer)
    except ValueError:
        return ()
    return prompt if len(prompt) < reader.info.context_length else ()


class _Store:
    """Writes shards of a useful size, and says how far it has come."""

    def __init__(self, shards: Shards, bound: int, total: int, report: Report) -> None:
        self._shards, self._bound, self._total, self._report = shards, bound, total, report
        self._waiting: list[Collected] = []
        self._bytes = shards.bytes
        self._answers = self._tokens = 0
        self._began = self._flushed = time.monotonic()

    def drawn(self, tokens: int) -> None:
        """Count tokens of a pass."""
        self._tokens += tokens
        passed = max(time.monotonic() - self._began, 1e-9)
        left = ""
        if self._answers:
            minutes = (self._total - self._answers) * passed / self._answers / 60
            left = f", at most {minutes:.0f} min left"
        self._report(
            f"{self._answers} of {self._total} answers, {self._bytes / (1 << 30):.2f} GiB, "
            f"{self._tokens / passed:.0f} tokens/s{left}"
        )

    def add(self, answer: Collected) -> bool:
        """Keep an answer. False where there is no room left for it."""
        size = answer.features.nbytes
        if self._bytes + size > self._bound:
            return False
        self._bytes += size
        self._answers += 1
        self._waiting.append(answer)
        waiting = sum(text.features.nbytes for text in self._waiting)
        if waiting > SHARD_BYTES or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()
        return True

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._shards.write(self._waiting)
        self._waiting = []
        self._flushed = time.monotonic()


def read_prompts(files: Sequence[Path], limit: int) -> tuple[Item, ...]:
    """The first prompts of some files. Raises ``UserError`` where they are too few to hold one
    back."""
    items = read_items(files)[:limit]
    if len(items) < 2:
        raise UserError("a head needs at least two prompts, one of them to measure; give more")
    return items
