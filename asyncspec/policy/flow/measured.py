"""What is measured while rounds run: speeds, draft levels, and how nodes slow each other down."""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS, TINY
from asyncspec.core.cost_model.pipeline import shorter_at_once
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS


class MeasuredSpeed(Struct, frozen=True):
    """Exponentially weighted sums of committed tokens and of the time they took. It holds also
    what a model of rounds leaves out, such as cores that stages share."""

    tokens: float = 0.0
    time: float = 0.0

    def mean(self, expected: float) -> float:
        """Tokens a time, where so many are expected before any was measured."""
        prior = FLOW_PARAMETERS.speed_prior
        return (prior + self.tokens) / (prior / expected + self.time)

    @property
    def doubt(self) -> float:
        """The share of what was expected in what is known: 1 where nothing was measured."""
        return FLOW_PARAMETERS.speed_prior / (FLOW_PARAMETERS.speed_prior + self.tokens)

    def likely(self, expected: float, round_tokens: float) -> float:
        """The mean, or what was expected where the difference may be chance, as
        ``round_tokens`` come at once."""
        mean = self.mean(expected)
        rounds = (FLOW_PARAMETERS.speed_prior + self.tokens) / round_tokens
        deviation = FLOW_PARAMETERS.speed_deviation / math.sqrt(rounds)
        return max(mean, min(expected, mean * (1.0 + deviation)))

    def observe(self, tokens: int, time: float, expected: float) -> MeasuredSpeed:
        """With ``tokens`` more."""
        keep = (1.0 - FLOW_PARAMETERS.speed_weight) ** tokens
        time = min(time, PARAMETERS.max_slowdown * tokens / expected)
        return MeasuredSpeed(keep * self.tokens + tokens, keep * self.time + time)

    def decay(self, tokens: int) -> MeasuredSpeed:
        """After ``tokens`` of the other kind."""
        keep = (1.0 - FLOW_PARAMETERS.other_speed_weight) ** tokens
        return MeasuredSpeed(keep * self.tokens, keep * self.time)


class LevelCost(Struct, frozen=True):
    """Seconds of a draft level by its rows, of all sessions that are drafted for together:
    exponentially weighted means, moments around them, and the line through both. Beside its levels
    a call takes ``call`` seconds."""

    rows: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0
    joint: float = 0.0
    call: float = 0.0
    # Calls that were measured; 0: what is known is a bound, which the first one replaces.
    calls: float = 0.0

    def observe(
        self, seconds: float, rows: float, sessions: int = 1, call: float = 0.0
    ) -> LevelCost:
        """With one of the ``sessions`` answers that a call brought."""
        if not self.calls:
            return LevelCost(rows, seconds, call=call, calls=1.0 / sessions)
        calls = self.calls + 1.0 / sessions
        weight = max(FLOW_PARAMETERS.level_weight, 1.0 / calls) / sessions
        slow = FLOW_PARAMETERS.level_row_weight / sessions
        seconds = min(seconds, PARAMETERS.max_slowdown * self.seconds)
        call = min(call, PARAMETERS.max_slowdown * (self.call + self.seconds))
        more, longer = rows - self.rows, seconds - self.seconds
        return LevelCost(
            self.rows + weight * more,
            self.seconds + weight * longer,
            self.spread + slow * (more * more - self.spread),
            self.joint + slow * (more * longer - self.joint),
            self.call + weight * (call - self.call),
            calls,
        )

    @property
    def row(self) -> float:
        """Expected seconds of a row more. Until levels of different numbers were measured it costs
        nothing; it never costs more than a level of its own."""
        slope = self.joint / self.spread if self.spread > TINY else 0.0
        return min(max(0.0, slope), self.seconds / max(1.0, self.rows))

    def at(self, rows: float) -> float:
        """Expected seconds."""
        return self.seconds + self.row * (rows - self.rows)


class Contention(Struct, frozen=True):
    """Times as long as alone that passes take: nodes share processors, and with other programs or
    a bound on their time."""

    # With one node at work.
    alone: float = 1.0
    # Nodes that can work at a time without slowing each other down.
    processors: float = math.inf
    # What was measured last with several at work, and their number; 0: nothing.
    together: float = 0.0
    busy: float = 0.0
    # Whether ``alone`` was measured.
    measured_alone: bool = False

    def at(self, busy: float, links: float = 0.0) -> float:
        """With the work of so many nodes in each second in which any is needed, as many ``links``
        times of which pass without: processors that have less to do then catch up."""
        return self.alone * max(1.0, busy / self.processors - links / self.alone)

    def observe(self, measured: float, busy: float, tokens: int) -> Contention:
        """With what was ``measured`` while that many nodes were at work, for so many tokens."""
        if busy < FLOW_PARAMETERS.min_busy:
            weight = FLOW_PARAMETERS.alone_weight
            alone = (
                shorter_at_once(self.alone, measured, weight) if self.measured_alone else measured
            )
            later = self.processors * (1.0 + FLOW_PARAMETERS.other_speed_weight) ** tokens
            if self.together:  # what slows one node down by now has not come from several
                later = max(later, self.busy * alone / self.together)
            return replace(self, alone=alone, processors=later, measured_alone=True)
        if not self.measured_alone and math.isinf(self.processors):
            # Nodes of different machines: until fewer are at work and faster, others slow them.
            return replace(self, alone=measured, together=measured, busy=busy, measured_alone=True)
        now = replace(self, together=measured, busy=busy)
        longer = measured / self.alone
        if longer <= 1.0 + PARAMETERS.report_change:
            return replace(now, processors=max(self.processors, busy))
        processors = busy / longer
        if math.isfinite(self.processors):
            # Only the last passes are in what was measured.
            weight = tokens / (FLOW_PARAMETERS.processors_prior + tokens)
            processors = self.processors * (processors / self.processors) ** weight
        return replace(now, processors=processors)


ALONE = Contention()
"""Every node has a processor of its own."""
