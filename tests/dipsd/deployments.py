"""Deployments drawn by Hypothesis: small enough to enumerate, with everything unequal."""

from __future__ import annotations

from hypothesis import strategies as st

from asyncspec.plugins.dipsd.model import (
    SERVER,
    TARGET,
    Deployment,
    Plan,
    StageProfile,
    User,
    Verifier,
)
from asyncspec.plugins.dipsd.optimizer.association import associations

milliseconds = st.floats(5, 150)


def users(most: int, fast: bool = False) -> st.SearchStrategy[tuple[User, ...]]:
    one = st.builds(
        User,
        name=st.just("u"),
        alpha=st.floats(0.05, 0.98),
        prefix=st.sampled_from([128, 512, 2048]),
        token_ms=st.floats(0.5, 15) if fast else milliseconds,
        link_ms=st.floats(0, 5 if fast else 60),
        link_token_ms=st.sampled_from([0.0, 2.0]),
    )
    return st.lists(one, min_size=1, max_size=most).map(tuple)


@st.composite
def deployments(
    draw: st.DrawFn, most: int = 4, stages: int = 3, longest: int = 6, fast: bool = False
) -> Deployment:
    """``stages`` is the most there are, of unequal speed; memory binds now and then.

    ``fast`` devices wait for a verifier whose rows are dear.
    """
    count = draw(st.integers(1, stages))
    base = TARGET.layers // count
    layers = [base] * (count - 1) + [TARGET.layers - base * (count - 1)]
    memory = draw(st.sampled_from([float("inf"), 4.8e10 + 2 * 6.8e8]))
    verifier = Verifier(
        TARGET,
        tuple(
            StageProfile(
                n,
                SERVER.ms_per_flop * draw(st.floats(5, 100) if fast else st.floats(0.5, 30)),
                draw(st.floats(0, 20) if fast else st.floats(1, 95)),
                memory if count == 1 else float("inf"),
            )
            for n in layers
        ),
        draw(st.sampled_from([0.0, 3.0])),
        draw(st.sampled_from(["batch", "all"])) if memory == float("inf") else "batch",
    )
    return Deployment(draw(users(most, fast)), verifier, draw(st.integers(1, longest)))


@st.composite
def planned(draw: st.DrawFn, most: int = 5, stages: int = 4) -> tuple[Deployment, Plan]:
    """A deployment and any plan for it, whether or not it fits in the memory."""
    deployment = draw(deployments(most, stages))
    count = len(deployment.users)
    groups = list(draw(st.sampled_from(list(associations(count)))))
    lengths = draw(st.lists(st.integers(1, deployment.longest), min_size=count, max_size=count))
    return deployment, Plan(tuple(draw(st.permutations(groups))), tuple(lengths))
