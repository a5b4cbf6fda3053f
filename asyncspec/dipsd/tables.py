"""A deployment tabled by user and draft length, and the budget of searches over these tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncspec.dipsd.model import Deployment, capacity


def expected_tokens(alpha: float, length: int) -> float:
    """u(l): accepted tokens of a linear draft and the one the target adds, 1 to ``length`` + 1."""
    if alpha >= 1:
        return float(length + 1)
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


class Budget:
    """``left`` units of work, each about a microsecond of a slow core."""

    def __init__(self, units: float) -> None:
        self.left = units

    def spend(self, units: float) -> bool:
        """Whether there was any left. What has begun is finished, so a little more may be done."""
        if self.left <= 0:
            return False
        self.left -= units
        return True

    def part(self, units: float) -> Budget:
        """So much of what is left, for a part of the search."""
        taken = max(0.0, min(units, self.left))
        self.left -= taken
        return Budget(taken)

    def take_back(self, part: Budget) -> None:
        """What a part has left over, or has done too much."""
        self.left += part.left


class Tables:
    """The functions of the model, tabled by user and draft length. Never changed once made.

    ``gain[m][k]`` is u_m(k) in tokens, ``draft[m][k]`` drafting and sending k tokens in ms
    (tau^d + tau^c), both with index 0 for no draft at all.
    """

    def __init__(self, deployment: Deployment) -> None:
        verifier, users = deployment.verifier, deployment.users
        self.deployment = deployment
        self.longest = deployment.longest
        self.users = len(users)
        lengths = range(self.longest + 1)
        self.gain = [[expected_tokens(u.alpha, k) for k in lengths] for u in users]
        self.draft = [
            [k * (u.token_ms + u.link_token_ms) + u.link_ms for k in lengths] for u in users
        ]
        self.prefix = [u.prefix for u in users]
        total = verifier.shape.layers
        # Milliseconds a FLOP of the whole target costs on a stage that holds a share of its layers.
        self.slopes = [s.ms_per_flop * s.layers / total for s in verifier.stages]
        self.fixed = [s.fixed_ms for s in verifier.stages]
        self.slope = sum(self.slopes)
        self.through = sum(self.fixed) + verifier.hop_ms * (len(self.fixed) - 1)
        shape = verifier.shape
        self._row = {
            prefix: [shape.flops(k, prefix) for k in lengths] for prefix in set(self.prefix)
        }
        self.capacity = capacity(verifier)
        self.by_batch = verifier.memory == "batch"
        self.batch_rows = deployment.batch_rows

    def work(self, users: Sequence[int]) -> list[float]:
        """FLOPs of a batch by its longest draft: all its rows are padded to the longest of them."""
        row = self._row[max(self.prefix[m] for m in users)]
        size = len(users)
        return [size * flops for flops in row]

    def row(self, prefix: int) -> list[float]:
        """FLOPs of one user with that prefix, by draft length."""
        return self._row[prefix]

    def passing(self, work: float) -> float:
        """Milliseconds from the first stage's start to the last one's end (the paper's t^v)."""
        return self.slope * work + self.through

    def server(self, work: float, batches: int) -> float:
        """Milliseconds the busiest stage needs for all batches of a cycle, ``work`` in sum."""
        return max(
            slope * work + fixed * batches
            for slope, fixed in zip(self.slopes, self.fixed, strict=True)
        )

    def busiest(self, work: float, batches: int) -> tuple[float, float]:
        """(ms a FLOP, fixed ms a batch) of the stage that ``server`` is about."""
        stages = zip(self.slopes, self.fixed, strict=True)
        return max(stages, key=lambda stage: stage[0] * work + stage[1] * batches)

    def longest_in(self, size: int) -> int:
        """The longest draft with which a batch of so many users fits in one pass; 0: with none. A
        user alone always does."""
        if size == 1 or not self.batch_rows:
            return self.longest
        return min(self.longest, self.batch_rows // size - 1)

    def fits(self, users: Sequence[int]) -> bool:
        """Whether a batch fits in one pass, with drafts of one token, and its caches fit; where all
        users' must, that was checked before."""
        if self.longest_in(len(users)) < 1:
            return False
        if not self.by_batch:
            return True
        return len(users) * max(self.prefix[m] for m in users) <= self.capacity

    def all_fit(self, groups: Iterable[Sequence[int]]) -> bool:
        """Whether every batch fits."""
        return all(self.fits(group) for group in groups)
