"""Fills a folder of shards with a target's answers, from where an interrupted run was."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from asyncspec.backend.feature_shards import ANSWERS, SHARD_BYTES, Collected, Shards
from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.errors import UserError, writing
from asyncspec_nodes.plugins.train_head.answers import Sample
from asyncspec_nodes.plugins.train_head.prompts import Item, number_of, opening, read_items

TEMPERATURES = (0.0, 0.8)
"""Each prompt is answered at both."""

assert len(TEMPERATURES) == ANSWERS

WRITTEN_TOKENS = 160
"""Tokens of a prompt that the target writes itself."""

FLUSH_SECONDS = 60.0

Report = Callable[[str], None]


class Answers(Protocol):
    """Answers as they are done, with hidden states after ``depths`` layers. ``between`` is called
    with the tokens drawn since; ``refused`` with what there will be no answer to."""

    def __call__(
        self,
        depths: tuple[int, ...],
        samples: Iterator[Sample],
        between: Callable[[int], None],
        refused: Callable[[Sample], None],
    ) -> Generator[Collected]: ...


class Reader(Struct, frozen=True):
    """A target: a loaded one, or that of a running cluster."""

    answers: Answers
    tokenizer: Tokenizer
    eos_token_ids: Sequence[int]
    # Tokens of prompt and answer at most.
    context: int


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
    start = opening(reader.tokenizer, next(iter(reader.eos_token_ids), 0))
    samples = (Sample(i, start, WRITTEN_TOKENS, 1.0, seed + i) for i in range(count))
    lines: list[bytes] = []
    key = "prompt" if reader.tokenizer.has_template else "text"
    for written in reader.answers((), samples, lambda tokens: None, lambda sample: None):
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
    first = [number_of(item) * ANSWERS for item in items]
    left_out: set[int] = set()

    def samples() -> Iterator[Sample]:
        order = [*range(len(items))]
        random.Random(bounds.seed).shuffle(order)
        for index in order:
            numbers = range(first[index], first[index] + ANSWERS)
            if all(number in done for number in numbers):
                continue
            prompt = _prompt(items[index], reader)
            if not prompt:
                left_out.add(first[index])
                continue
            tokens = min(bounds.tokens, reader.context - len(prompt))
            for number, temperature in zip(numbers, TEMPERATURES, strict=True):
                if number not in done:
                    yield Sample(number, prompt, tokens, temperature, bounds.seed ^ number)

    missing = sum(number + i not in done for number in first for i in range(ANSWERS))
    store = _Store(shards, bounds.disk, missing, report)
    answers = reader.answers(
        shards.notes.depths,
        samples(),
        store.drawn,
        lambda sample: left_out.add(sample.number // ANSWERS * ANSWERS),
    )
    try:
        for answer in answers:
            if not store.add(answer):
                break
    finally:
        answers.close()
        store.flush()
    return len(left_out)


def _prompt(item: Item, reader: Reader) -> tuple[int, ...]:
    """Empty where it cannot be answered."""
    try:
        prompt = item.tokens(reader.tokenizer)
    except ValueError:
        return ()
    return prompt if len(prompt) < reader.context else ()


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
