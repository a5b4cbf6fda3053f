"""A deployment tabled by user and draft length, and the budget of searches over these tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from asyncspec.dipsd.model import Deployment, capacity


def expected_tokens(alpha: float, length: int) -> float:
    """u(l): accepted tokens of a linear draft and the bonus token, 1 to ``length`` + 1."""
    if alpha >= 1:
        return float(length + 1)
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


class Budget:
    """``left`` units of work, each about a microsecond of a slow core."""

    def __init__(self, units: float) -> None:
        self.left = units

    def spend(self, units: float) -> bool:
        """Whether any was left. Work once begun is completed, so ``left`` may fall below 0."""
        if self.left <= 0:
            return False
        self.left -= units
        return True

    @contextmanager
    def part(self, units: float) -> Iterator[Budget]:
        """At most ``units`` of what is left; what is not spent of it is returned."""
        part = Budget(max(0.0, min(units, self.left)))
        self.left -= part.left
        yield part
        self.left += part.left


class Tables:
    """The functions of the model, tabled by user and draft length. Never changed once made.

    ``gain[m][k]`` is u_m(k) in tokens, ``draft[m][k]`` drafting and sending k tokens in ms
    (tau^d + tau^c), ``rows[prefix][k]`` FLOPs of a user with that prefix; all with index 0 for no
    draft at all. ``slopes`` and ``fixed``: ms a FLOP of the whole target, and ms a pass, by stage;
    ``slope`` and ``through``: their sums, with the hops between stages.
    """

    def __init__(self, deployment: Deployment) -> None:
        verifier, users, shape = deployment.verifier, deployment.users, deployment.verifier.shape
        self.deployment = deployment
        self.longest = deployment.longest
        self.users = len(users)
        lengths = range(self.longest + 1)
        self.gain = [[expected_tokens(u.alpha, k) for k in lengths] for u in users]
        self.draft = [
            [k * (u.token_ms + u.link_token_ms) + u.link_ms for k in lengths] for u in users
        ]
        self.prefix = [u.prefix for u in users]
        self.rows = {p: [shape.flops(k, p) for k in lengths] for p in set(self.prefix)}
        self.slopes = [s.ms_per_flop * s.layers / shape.layers for s in verifier.stages]
        self.fixed = [s.fixed_ms for s in verifier.stages]
        self.slope = sum(self.slopes)
        self.through = sum(self.fixed) + verifier.hop_ms * (len(self.fixed) - 1)
        self.capacity = capacity(verifier)

    def work(self, users: Sequence[int]) -> list[float]:
        """FLOPs of a batch by its longest draft: all its rows are padded to the longest of them."""
        row = self.rows[max([self.prefix[m] for m in users])]
        return [len(users) * flops for flops in row]

    def batch_work(self, users: Sequence[int], lengths: Sequence[int]) -> float:
        """FLOPs of a batch with these draft lengths (by user)."""
        return self.work(users)[max([lengths[m] for m in users])]

    def stages(self, work: float) -> tuple[float, ...]:
        """Milliseconds of a pass on each stage."""
        return tuple([s * work + f for s, f in zip(self.slopes, self.fixed, strict=True)])

    def passing(self, work: float) -> float:
        """Milliseconds from the first stage's start to the last one's end (the paper's t^v)."""
        return self.slope * work + self.through

    def server(self, work: float, batches: int) -> float:
        """Milliseconds the busiest stage needs for all batches of a cycle, ``work`` in sum."""
        slope, fixed = self.busiest(work, batches)
        return slope * work + fixed * batches

    def busiest(self, work: float, batches: int) -> tuple[float, float]:
        """(ms a FLOP, fixed ms a batch) of the stage that ``server`` is about."""
        stages = zip(self.slopes, self.fixed, strict=True)
        return max(stages, key=lambda stage: stage[0] * work + stage[1] * batches)

    def longest_in(self, size: int) -> int:
        """The longest draft with which a batch of so many users fits in one pass; 0: with none. A
        single user always fits."""
        rows = self.deployment.batch_rows
        if size == 1 or not rows:
            return self.longest
        return max(0, min(self.longest, rows // size - 1))

    def fits(self, users: Sequence[int]) -> bool:
        """Whether a batch fits in one pass with drafts of one token, and its caches in the memory
        (``check_memory`` has checked all users' where these must fit together)."""
        if self.longest_in(len(users)) < 1:
            return False
        if self.deployment.verifier.memory == "all":
            return True
        return len(users) * max(self.prefix[m] for m in users) <= self.capacity

    def all_fit(self, groups: Iterable[Sequence[int]]) -> bool:
        """Whether every batch fits."""
        return all(self.fits(group) for group in groups)
