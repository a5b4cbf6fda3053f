"""A stage that knows the target's text, and computes nothing.

The verdict for a row at position p is the text's token p + 1, whatever the row's own token. For
rows off the text that is not what the target would say; but such rows are never reached by
acceptance, which goes from the tip along confirmed tokens only, so these verdicts are never used.
The caller checks in the end that the output is the text (``virtual.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncspec.core.jobs import Admit, Batch, Forward, SamplerOutput, StageJob

NOTHING = 0
"""What comes after the text's end: never used either."""


class TextStage:
    """One session of one text. ``features`` [positions, F]: of the text, a tensor; only the last
    stage needs them, and only in sessions that want them."""

    def __init__(self, text: Sequence[int], features: Any = None, *, last: bool) -> None:
        self._text = text
        self._features = features
        self._last = last
        self._wanted = False

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``."""
        if isinstance(job, Admit):
            self._wanted = bool(job.features)
        if isinstance(job, Batch):
            return tuple(map(self._forward, job.passes))
        return self._forward(job) if isinstance(job, Forward) else None

    def _forward(self, job: Forward) -> object:
        if not self._last:
            return tuple(range(len(job.rows)))
        tokens = tuple(self._after(job.rows[row].position) for row in job.sampled_rows)
        if not self._wanted:
            return tokens
        # Rows past the end of the text are no part of it; any feature will do.
        end = len(self._features) - 1
        places = [min(row.position, end) for row in job.rows]
        return SamplerOutput(tokens, self._features[places])

    def _after(self, position: int) -> int:
        return self._text[position + 1] if position + 1 < len(self._text) else NOTHING
