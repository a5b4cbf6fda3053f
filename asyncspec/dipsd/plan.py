"""A plan: who is verified together, in which cyclic order, and how long each draft is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from asyncspec.dipsd.model import Deployment

Groups = tuple[tuple[int, ...], ...]
"""Users by batch, as indices into the deployment's users."""


class Batch(Struct, frozen=True):
    """Users verified in one pass, and the draft length of each of them."""

    users: tuple[int, ...]
    lengths: tuple[int, ...]


class Plan(Struct, frozen=True):
    """Batches in the order in which the verifier visits them, round and round."""

    batches: tuple[Batch, ...]

    @property
    def groups(self) -> Groups:
        """The association without the lengths."""
        return tuple(batch.users for batch in self.batches)

    @property
    def lengths(self) -> dict[int, int]:
        """Draft length by user."""
        return {m: k for b in self.batches for m, k in zip(b.users, b.lengths, strict=True)}


def plan_of(groups: Iterable[Sequence[int]], lengths: Sequence[int] | dict[int, int]) -> Plan:
    """A plan from an association and a draft length for each user."""
    return Plan(tuple(Batch(tuple(g), tuple(lengths[m] for m in g)) for g in groups))


def problem(plan: Plan, deployment: Deployment) -> str:
    """Why ``plan`` is not one for ``deployment``; empty if it is."""
    named = sorted(m for batch in plan.batches for m in batch.users)
    if named != list(range(len(deployment.users))):
        return "every user must be in exactly one batch"
    if not all(batch.users for batch in plan.batches):
        return "a batch has no users"
    if any(len(batch.users) != len(batch.lengths) for batch in plan.batches):
        return "a batch needs a draft length for each of its users"
    if not all(1 <= k <= deployment.longest for b in plan.batches for k in b.lengths):
        return f"draft lengths must be between 1 and {deployment.longest}"
    return ""
