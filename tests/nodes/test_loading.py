"""What a cluster file makes of a node."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec.core.jobs import TensorRows
from asyncspec.plugins.hf.kernels.device import EMULATED
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node.loading import load_node
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.roles.draft.session import DraftState
from asyncspec_nodes.roles.verify.config import max_sessions
from asyncspec_protocol.ids import DRAFT, Rank, draft_rank

pytestmark = pytest.mark.torch

CONFIG = local_config(
    TargetTable(path=str(BUNDLED_TARGET)), DraftTable("none", "autoregressive"), 2, 1
)
RESTART_STAGES = replace(CONFIG, node=tuple(node for node in CONFIG.node if node.rank))


def draft_state(rank: Rank, named: bool, source: str = "none", device: str = "auto") -> DraftState:
    config = CONFIG if named else RESTART_STAGES
    target, draft = replace(config.target, device=device), replace(config.draft, source=source)
    config = replace(config, target=target, draft=draft)
    state = load_node(config, rank, Reporter(rank, None)).machine.initial()
    assert isinstance(state, DraftState)
    return state


def test_a_draft_node_that_the_file_names_need_not_look_out_for_others() -> None:
    assert draft_state(DRAFT, named=True).config.sole


@pytest.mark.parametrize("number", [0, 1])
def test_where_the_file_names_none_there_may_be_several(number: int) -> None:
    assert not draft_state(draft_rank(number), named=False).config.sole


@pytest.mark.parametrize(
    ("source", "remembers"),
    [("ngram", False), ("suffix", True), ("ngram+suffix", True), ("twin:int8+suffix", True)],
)
def test_suffix_decoding_remembers_answers(source: str, remembers: bool) -> None:
    assert draft_state(DRAFT, named=True, source=source).config.source_remembers == remembers


def test_what_cannot_learn_is_refused() -> None:
    eagle = replace(CONFIG.draft, source=f"eagle:{BUNDLED_EAGLE}", learn=True)
    with pytest.raises(UserError, match="demo-eagle cannot learn: it is an EAGLE-1"):
        load_node(replace(CONFIG, draft=eagle), DRAFT, Reporter(DRAFT, None))


@pytest.mark.parametrize(("source", "at_once"), [("none", 2), ("twin:int8", 1)])
def test_nodes_of_one_machine_take_turns_on_its_gpu(source: str, at_once: int) -> None:
    """A draft node without a model has none of it."""
    state = draft_state(DRAFT, named=True, source=source, device=EMULATED)
    assert state.config.processors == at_once


def test_a_stage_knows_what_its_rows_take_and_how_many_sessions_may_come() -> None:
    limited = replace(CONFIG, limits=replace(CONFIG.limits, sessions=5))
    loaded = load_node(limited, Rank(1), Reporter(Rank(1), None))
    stage = loaded.tensors
    assert isinstance(stage, HFStage)
    row = stage.pack(TensorRows(stage.noise(1), (0,)))
    config = loaded.machine.initial().config
    assert config.row_bytes == row.data.nbytes
    assert config.sessions == max_sessions(5) > 16 * 5
