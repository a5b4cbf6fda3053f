"""The answers that a learner has in memory: those of the last hour, as far as there is room."""

from __future__ import annotations

import threading
from collections import deque

from asyncspec.backend.learning.messages import Example

SECONDS = 3600.0
"""An answer is kept for so long."""

HELD_OUT = 5
"""The answers to one prompt of so many are not trained on."""


def is_held_out(example: Example) -> bool:
    """Whether an example only measures. Answers to equal prompts share their fate."""
    return example.group % HELD_OUT == 0


class ExampleBuffer:
    """Bounded by rows and by age; the oldest go first. Thread-safe.

    Arguments:
        limit: bytes of the features of all examples.
        seconds: an example is kept for.
    """

    def __init__(self, limit: int, seconds: float = SECONDS) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._seconds = seconds
        self._examples: deque[tuple[float, Example]] = deque()
        self.bytes = 0
        # How many have been added, those that are gone included.
        self.added = 0

    def __len__(self) -> int:
        return len(self._examples)

    def add(self, example: Example, now: float) -> None:
        """Keep an example, unless it is larger than the whole buffer."""
        self.expire(now)
        if len(example.features) > self._limit:
            return
        with self._lock:
            self._examples.append((now, example))
            self.bytes += len(example.features)
            self.added += 1
            while self.bytes > self._limit:
                self._drop()

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        with self._lock:
            while self._examples and now - self._examples[0][0] >= self._seconds:
                self._drop()

    def _drop(self) -> None:
        _, example = self._examples.popleft()
        self.bytes -= len(example.features)

    @property
    def training(self) -> list[Example]:
        """Examples to learn from."""
        with self._lock:
            return [example for _, example in self._examples if not is_held_out(example)]

    @property
    def held_out(self) -> list[Example]:
        """Examples that only measure."""
        with self._lock:
            return [example for _, example in self._examples if is_held_out(example)]
