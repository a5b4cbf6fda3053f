"""What ``flow`` has learned on a draft node, and the shape of rounds that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.policy.base import Committed
from asyncspec.policy.flow.acceptance import Acceptance
from asyncspec.policy.flow.mean_tree import RoundShape
from asyncspec.policy.flow.measured import ALONE, Contention, LevelCost, MeasuredSpeed
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS
from asyncspec.policy.flow.rounds import (
    PLAIN,
    STARTS,
    RoundCosts,
    RoundRate,
    best_shape,
    hits_in_a_row,
    round_rate,
)


class FlowMemory(Struct, frozen=True):
    """What was learned, and the shape of rounds that follows from it."""

    acceptance: Acceptance = Acceptance()
    # Seconds of a draft level, by its rows; None: none was measured.
    level: LevelCost | None = None
    # None: nothing was measured.
    contention: Contention | None = None
    shape: RoundShape = RoundShape(4, 4, 4)
    rate: RoundRate = RoundRate(0.0, 0.0, 8)
    # Tokens committed in all, those until a shape is chosen anew, and the sessions there were.
    committed: int = 0
    due: int = 0
    sessions: int = 1
    # Mean cost of a segment's rows beside the root, in passes of one row; and expected tokens a
    # second without speculation, 0: no shape was chosen yet.
    row_share: float = 0.0
    plain_rate: float = 0.0
    # Measured speeds of rounds of one segment and of others, in times the expected one, and without
    # speculation, in tokens a second.
    speculating: tuple[MeasuredSpeed, MeasuredSpeed] = (MeasuredSpeed(), MeasuredSpeed())
    plain: MeasuredSpeed = MeasuredSpeed()
    # Tokens of the present shape, and the seconds they took.
    tokens: int = 0
    seconds: float = 0.0

    @property
    def draft_seconds(self) -> float:
        """Seconds to draft the levels of a segment; 0 where none was measured."""
        if self.level is None:
            return 0.0
        levels = self.shape.levels or self.shape.first or 1
        return self.level.call + levels * self.level.at(self.sessions * self.shape.rows)

    @property
    def speculating_now(self) -> MeasuredSpeed:
        """Speed of the present shape's kind; without speculation, of the kind measured more
        often."""
        single, several = self.speculating
        if self.shape.rows:
            return several if self.shape.levels else single
        return max(single, several, key=lambda speed: speed.tokens)

    @property
    def draft_is_free(self) -> bool:
        """The draft node could draft twice as much, and slows no other down."""
        processors = (self.contention or ALONE).processors
        return 2.0 * self.draft_seconds <= self.rate.spacing and self.rate.busy < processors

    @property
    def least_chance(self) -> float:
        """Least acceptance probability of a node that is worth its row."""
        return FLOW_PARAMETERS.worthwhile_chance * self.rate.least

    @property
    def probe_interval(self) -> int:
        """Commits from one draft that is not sent to the next."""
        seconds = self.draft_seconds + FLOW_PARAMETERS.handling_seconds
        share, longest = FLOW_PARAMETERS.probe_share, FLOW_PARAMETERS.max_probe_interval
        if self.acceptance.observed < FLOW_PARAMETERS.early_nodes:
            share = FLOW_PARAMETERS.early_probe_share
            longest = FLOW_PARAMETERS.max_early_probe_interval
        return min(longest, max(1, math.ceil(seconds * self.plain_rate / share)))

    def committing(self, event: Committed) -> FlowMemory:
        """With the target's tokens."""
        acceptance = self.acceptance.observe(event.tree, event.tokens)
        count = len(event.tokens)
        memory = replace(self, acceptance=acceptance, committed=self.committed + count)
        # What was sent before the shape changed is neither.
        if not event.seconds or not self.plain_rate or event.speculated > (self.shape.rows > 0):
            return memory
        return replace(memory, tokens=self.tokens + count, seconds=self.seconds + event.seconds)

    def measured(self, costs: RoundCosts, plain_rate: float) -> FlowMemory:
        """With the speed of the present shape. That of one with speculation is compared with what
        would be expected of it by now, when the draft is better known."""
        memory, count = replace(self, tokens=0, seconds=0.0), self.tokens
        if not count:
            return memory
        single, several = (speed.decay(count) for speed in self.speculating)
        if not self.shape.rows:
            plain = self.plain.observe(count, self.seconds, plain_rate)
            return replace(memory, plain=plain, speculating=(single, several))
        memory = replace(memory, plain=self.plain.decay(count))
        if self.acceptance.observed < FLOW_PARAMETERS.min_observed:
            return memory
        expected = round_rate(self.acceptance.profile, self.shape, costs).tokens_per_second
        seconds = self.seconds * expected
        if self.shape.levels:
            several = self.speculating[1].observe(count, seconds, 1.0)
        else:
            single = self.speculating[0].observe(count, seconds, 1.0)
        return replace(memory, speculating=(single, several))

    def _nearby(self) -> Sequence[RoundShape]:
        """The present shape, and its rounds in one segment, as their speeds are measured apart."""
        shape = self.shape
        single = RoundShape(shape.first or shape.levels, 0, shape.rows)
        return (shape, single) if shape.levels else (shape,)

    def _likely_speeds(self, costs: RoundCosts, plain_rate: float) -> Callable[[RoundShape], float]:
        """By a shape's kind, the speed to expect of it, in times what the model of rounds does."""
        single, several = self.speculating
        # What makes plain decoding slower than expected, as other programs do, slows rounds, too.
        usual = self.plain.mean(plain_rate) / plain_rate
        # Where a round goes on with every hit, so many tokens come or fail together.
        at_once = 1.0 + hits_in_a_row(self.acceptance.profile[0])
        # What slows rounds of one segment down, such as late drafts, slows those of several, too.
        slower = min(usual, single.mean(usual))
        if costs.sessions > 1:
            expected = slower**FLOW_PARAMETERS.session_slowdown
        else:
            expected = slower * FLOW_PARAMETERS.regrowth
        several_now = several.likely(expected, at_once)
        one_now = single.likely(usual, 1.0)
        if min(single.doubt, self.plain.doubt) > FLOW_PARAMETERS.max_doubt:
            # Passes may take longer than alone because several rounds are under way, even on other
            # machines (bounds on processor time). Only rounds of one segment can tell, or none, and
            # as slow as the others they would not be chosen.
            one_now *= costs.contention.at(1.0)
        plain = self.plain.likely(plain_rate, 1.0) / plain_rate
        # Where speculation is slower than expected, so may be what is expected without.
        plain *= 1.0 + self.plain.doubt * max(0.0, 1.0 - min(one_now, several_now))

        def gain(shape: RoundShape) -> float:
            if not shape.rows:
                return plain * (1.0 + FLOW_PARAMETERS.min_gain)
            return several_now if shape.levels else one_now

        return gain

    def choosing(self, costs: RoundCosts) -> FlowMemory:
        """With the shape that brings most."""
        shortest, longest = FLOW_PARAMETERS.min_replan_tokens, FLOW_PARAMETERS.max_replan_tokens
        pause = min(max(self.committed, shortest), longest)
        # The first search is thorough: no token waits for it, as the prompt is being read.
        few = (STARTS[self.due // shortest % len(STARTS)], *self._nearby())
        starts = few if self.committed else STARTS
        plain_rate = round_rate(self.acceptance.profile, PLAIN, costs).tokens_per_second
        memory = self.measured(costs, plain_rate)
        gain = memory._likely_speeds(costs, plain_rate)
        shape, rate = best_shape(self.acceptance.profile, costs, starts, gain)
        single, several = memory.speculating
        if shape.rows and (several if shape.levels else single).doubt > FLOW_PARAMETERS.trial_doubt:
            pause = min(pause, FLOW_PARAMETERS.trial_tokens)
        more = max(1, shape.rows)
        row = (costs.slowest(1 + more) - costs.slowest(1)) / more
        return replace(
            memory,
            shape=shape,
            rate=rate,
            due=self.committed + pause,
            sessions=costs.sessions,
            row_share=row / costs.slowest(1) if row else 0.0,
            plain_rate=plain_rate,
        )
