"""When a session's next segment is expected at a stage."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS


class ReturnTime(Struct, frozen=True):
    """Seconds from the end of a session's pass to its next segment, where none waited by then:
    exponentially weighted mean and mean deviation; 0: not known."""

    # End and rows of the session's last pass; None: a segment has come since.
    left: float | None = None
    rows: int = 0
    seconds: float = 0.0
    deviation: float = 0.0

    def ended(self, at: float, rows: int) -> ReturnTime:
        """A pass ends, and nothing of the session waits."""
        return replace(self, left=at, rows=rows)

    def returned(self, now: float) -> ReturnTime:
        """The first segment since then is here."""
        if self.left is None:
            return self
        seconds = now - self.left
        if not self.seconds:
            return ReturnTime(None, self.rows, seconds, seconds / 2)
        weight, error = PARAMETERS.return_weight, seconds - self.seconds
        return ReturnTime(
            None,
            self.rows,
            self.seconds + weight * error,
            self.deviation + weight * (abs(error) - self.deviation),
        )

    @property
    def latest(self) -> float:
        """By when the next segment comes, unless something is different now."""
        seconds = self.seconds + PARAMETERS.return_deviations * self.deviation
        return (self.left or 0.0) + seconds
