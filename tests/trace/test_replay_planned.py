"""A recorded run with plans is made again: they are a function of what was asked."""

from __future__ import annotations

from asyncspec.policy.registry import POLICIES
from asyncspec.trace.records import Step, TaskRun
from asyncspec_nodes.plugins.viewer.replay import replay
from dipsd.planned_cluster import Bench, Person, Trial


def test_a_run_with_plans_is_replayed() -> None:
    trial = Trial(Bench([Person(0.01), Person(0.03), Person(0.05)]), tokens=60, record=True)
    trial.run()
    lines = trial.cluster.trace().lines
    steps = [line for line in lines if isinstance(line, Step)]
    assert any(isinstance(effect, TaskRun) for step in steps for effect in step.effects)
    replayed = replay(lines, POLICIES)
    assert len(replayed) == 4
    assert all(one.difference is None for one in replayed)
