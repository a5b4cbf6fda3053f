"""Whatever a peer says, no job of a stage with tensors fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.backend.tree_stage import TreeStage
from asyncspec.core.jobs import Release
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Segment
from nodes.byzantine_peer import connected_stage, send_arbitrary_messages
from nodes.machine_driver import opening, prune, segment

pytestmark = pytest.mark.torch

VOCAB, WIDTH = 32, 32
ODD = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40)


MakeStage = Callable[[int, int], TreeStage[Any]]


@pytest.fixture(scope="module", params=["checkpoint", "gguf"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeStage:
    """Stages of a tiny model without a session."""
    from backend.tiny import save_tiny

    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny(path, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=2, vocab_size=VOCAB)
    if request.param == "gguf":
        gguf_models: Any = pytest.importorskip("backend.gguf_models")
        target = open_target(gguf_models.convert(path, path.with_suffix(".gguf")))
        load = cache(partial(load_stage, target))
        return lambda first, last: LlamaStage(load(first, last).engine, target.info, (first, last))
    checkpoint = open_checkpoint(path)

    @cache
    def shard(first: int, last: int) -> Shard:
        with torch.inference_mode():
            return load_shard(checkpoint, first, last, torch.float32, "exact", KernelSettings())

    return lambda *span: HFStage(shard(*span), "exact", KernelSettings(), "tolerance")


def rows(draw: Any, message: Segment) -> WireTensor:
    """Hidden states for a segment, most often of the right shape and often with numbers that are
    none."""
    count, outer = len(message.ids), (1 + message.aux_states,) if 0 < message.aux_states < 9 else ()
    odd = [(count, 31), (count, 1, WIDTH), (count, 3, WIDTH), (count + 1, WIDTH), (WIDTH,)]
    shape = draw(st.sampled_from([(count, *outer, WIDTH)] * 9 + odd))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(message.segment % 99))
    if draw(st.booleans()):
        numbers.view(-1)[draw(st.integers(0, numbers.numel() - 1))] = draw(st.sampled_from(ODD))
    if draw(st.integers(0, 9)) == 0:
        numbers.fill_(draw(st.sampled_from(ODD)))
    kind = draw(st.sampled_from(["float32"] * 9 + ["bfloat16", "int64"]))
    data = memoryview(bytearray(numbers.numpy().tobytes()))
    if kind == "bfloat16":
        data = data[: data.nbytes // 2]
    return WireTensor(kind, shape, data)


@pytest.mark.parametrize(("horizon", "keep"), [(4, (3,)), (3, ())])
def test_a_node_whose_parent_is_dead_is_computed_no_further(
    make: MakeStage, horizon: int, keep: tuple[int, ...]
) -> None:
    """Of the chain 0-1-2-3. Its place in the cache would be another one than its position."""
    device = make(0, 2)
    node = connected_stage(1, 1, VOCAB, device, 2)
    node.receive(0, opening(1))
    for number, some in enumerate(({0: -1}, {1: 0, 2: 1, 3: 2})):
        node.receive(0, segment(number, some))
        node.rest()
    node.receive(0, prune(1, horizon, (), keep).message)
    node.receive(0, segment(2, {4: 3}))
    node.rest()
    assert [error.peer for error in node.refused] == [0]
    device.run(Release(SessionId(0)))


@settings(max_examples=100)
@given(data=st.data())
def test_no_job_of_a_stage_fails(data: st.DataObject, make: MakeStage) -> None:
    stages = data.draw(st.integers(1, 2))
    rank = data.draw(st.integers(1, stages))
    each = 2 // stages
    device = make(each * (rank - 1), each * rank)
    node = connected_stage(rank, stages, VOCAB, device, each)
    try:
        send_arbitrary_messages(node, data, VOCAB, lambda d, m: None if rank == 1 else rows(d, m))
        device.check()
    finally:
        for session in [*device._sessions]:
            device.run(Release(session))
