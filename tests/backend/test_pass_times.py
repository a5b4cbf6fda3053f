"""What a stage's passes take is tried when it is loaded, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from asyncspec.backend import tree_stage
from asyncspec.backend.base import Mode
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.device import EMULATED, find
from backend.probe import cut, same_bits

pytestmark = pytest.mark.torch


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is tried, however busy this machine is."""
    monkeypatch.setattr(tree_stage, "PARAMETERS", replace(PARAMETERS, trial_seconds=600.0))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_reports_its_pass_times(
    mode: Mode, dtype: str, tiny: Callable[..., Path]
) -> None:
    for stage in cut(open_checkpoint(tiny()), 3, dtype=dtype, mode=mode):
        taken = stage.pass_seconds()
        assert list(taken) == sorted(PARAMETERS.trial_rows)
        assert min(taken.values()) > 0
        assert not stage._sessions


@pytest.mark.usefixtures("patient")
def test_an_accelerator_tries_its_largest_pass(tiny: Callable[..., Path]) -> None:
    (stage,) = cut(open_checkpoint(tiny()), 1, device=find(EMULATED))
    largest = stage.settings.buckets[-1]
    assert largest > max(PARAMETERS.trial_rows)
    assert max(stage.pass_seconds()) == largest


def test_a_large_stage_tries_few_sizes(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_stage, "PARAMETERS", replace(PARAMETERS, trial_seconds=0.0))
    (stage,) = cut(open_checkpoint(tiny()), 1)
    assert list(stage.pass_seconds()) == [1, 16]


def test_other_work_on_the_cores_does_not_count(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a machine try their passes at once: by the clock on the wall a pass of one row
    may take as long as one of sixteen, and speculation would seem free, or useless."""
    (stage,) = cut(open_checkpoint(tiny()), 1)
    thread, wall = count(step=1 / 1024).__next__, count(step=1 / 16).__next__
    clocks = SimpleNamespace(thread_time=thread, perf_counter=wall)
    monkeypatch.setattr(tree_stage, "time", clocks)
    assert set(stage.pass_seconds().values()) == {1 / 1024}


def test_a_stage_is_as_before(tiny: Callable[..., Path]) -> None:
    stages = cut(open_checkpoint(tiny()), 2)
    for stage in stages:
        stage.pass_seconds()
    same_bits(stages, "after")
