"""EAGLE heads on real stages, in the simulator: the target's text, and features where they belong,
under any delays, cuts and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from asyncspec.backend.reference import decode
from asyncspec.core.machine import Request
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
from asyncspec.plugins.hf.heads.eagle.source import EagleSource, load_eagle
from asyncspec.plugins.llama.target import open_target
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_protocol.ids import Rank
from backend import eagle_heads
from backend.eagle_cluster import EagleCluster
from backend.eagle_heads import TARGET
from backend.hf_cluster import Loaded
from backend.stage_cluster import LoadedTarget
from backend.test_features import plain, plain_model
from backend.tiny import VOCAB
from cluster import ask
from costs import UnitCosts
from effort import NIGHTLY, nightly
from laws import SMALL, Shaken, watch_invariants

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
NEW = 20
HEADS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "eagle": (eagle_heads.eagle, {}),
    "eagle3": (eagle_heads.eagle3, {}),
    "eagle3-ends": (eagle_heads.eagle3, {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}),
}


class Target(NamedTuple):
    """A target's stages, and the checkpoint that they were made of."""

    loaded: LoadedTarget[Any]
    model: Any
    path: Path
    # llama.cpp keeps keys and values in float16.
    rounding: float = 5e-4

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Hugging Face's own text, or that of one stage, one row a pass."""
        return greedy(self.loaded, self.path, tuple(prompt), count)


@pytest.fixture(scope="module", params=["checkpoint", "gguf"])
def target(request: pytest.FixtureRequest, tiny: MakeTiny, tmp_path_factory: Any) -> Target:
    path = tiny("llama", **TARGET)
    if request.param == "checkpoint":
        checkpoint = open_checkpoint(path)
        return Target(Loaded(checkpoint), checkpoint, path)
    gguf_models: Any = pytest.importorskip("backend.gguf_models")
    file = gguf_models.convert(path, tmp_path_factory.mktemp("gguf") / "model.gguf", "F32")
    opened = open_target(file)
    return Target(gguf_models.LoadedGGUF(opened), opened, path, 0.1)


def head(kind: str, target: Target, directory: Path) -> EagleSource:
    state, settings = HEADS[kind]
    return load_eagle(eagle_heads.save(directory, state(), **settings), target.model)


def request(seed: int, **changes: Any) -> Request:
    random = Random(seed)
    prompt = tuple(random.randrange(3, VOCAB) for _ in range(random.randint(1, 20)))
    return ask(seed, prompt=prompt, max_new_tokens=NEW, **changes)


@cache
def greedy(loaded: LoadedTarget[Any], path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """As ``Target.greedy``: many clusters are asked the same."""
    if isinstance(loaded, Loaded):
        return generate(path, prompt, count)
    return decode(loaded.cut(1), prompt, count)


def generate(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """By Hugging Face alone, greedily and past any end of text."""
    model = plain_model(path)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return list(map(int, out[0, len(prompt) :]))


def check(cluster: EagleCluster, asked: Sequence[Request], target: Target) -> None:
    """The target's text, and the source was fed the features of its positions in every session."""
    eagle, world = cluster.watched.eagle, cluster.world
    eagle.check()
    assert not eagle._sessions
    assert not eagle._fed
    features, rounding = [], target.rounding
    for one in asked:
        new = target.greedy(one.prompt, one.max_new_tokens)
        assert world.tokens[one.request] == new
        features.append(plain(target.path, [*one.prompt, *new], eagle.features.wanted))
    # Sessions are numbered in the order of the requests; one request alone may need several.
    for session, rows in cluster.watched.fed.items():
        index, found = min(session, len(asked) - 1), torch.cat(rows)
        assert len(found) >= len(asked[index].prompt)
        torch.testing.assert_close(
            found, features[index][: len(found)], atol=rounding, rtol=rounding
        )
    assert len(cluster.watched.fed) >= len(asked)


def check_on_clusters(source: EagleSource | DFlashSource, target: Target) -> None:
    """One stage, and two with the source on a node of its own, write what ``generate`` does."""
    for stages, apart in ((1, False), (2, True)):
        delays = [Random(stages).randint(0, 9) for _ in range(23)]
        cluster = EagleCluster(
            Shaken(delays), target.loaded, source, stages=stages, policies=SMALL, apart=apart
        )
        asked = [request(i, policy=policy) for i, policy in enumerate(("chunked", "flowspec"))]
        for one in asked:
            cluster.submit(one)
        cluster.world.run(until=100_000.0)
        check(cluster, asked, target)


TRIED = (("eagle", 4, False), ("eagle3", 2, True), ("eagle3-ends", 4, False))
"""Kinds of heads and cuts take turns in ``make check``."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stages", "apart"),
    [
        case if case in TRIED else nightly(*case)
        for case in product(HEADS, (1, 2, 4), (False, True))
    ],
)
def test_any_delays(target: Target, tmp_path: Path, kind: str, stages: int, apart: bool) -> None:
    eagle = head(kind, target, tmp_path / "head")
    # Kinds and cuts take turns; the matrix has every policy with heads of both kinds.
    turn = ([*HEADS].index(kind) + apart) % 2
    for seed, policies in enumerate((("chunked", "flowspec"), ("pruned", "flowspec-no-sbd"))):
        if seed != turn and not NIGHTLY:
            continue
        random = Random(f"{kind} {stages} {seed}")
        delays = [random.randint(0, 9) for _ in range(23)]
        cluster = EagleCluster(
            Shaken(delays),
            target.loaded,
            eagle,
            stages=stages,
            policies=SMALL,
            prefill_rows=3,
            apart=apart,
        )
        watch_invariants(cluster)
        asked = [request(i, policy=policy) for i, policy in enumerate(policies, 2 * seed)]
        for one in asked:
            cluster.submit(one)
        cluster.world.run(until=100_000.0)
        check(cluster, asked, target)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(1, 2), (0, 4)])
def test_a_lost_node(target: Target, tmp_path: Path, lost: tuple[int, int]) -> None:
    """The new session's prompt is the whole text so far, and its features come back again, also
    where the token source is the node that was lost."""
    eagle = head("eagle3", target, tmp_path / "head")
    apart = lost == (0, 4)
    options: dict[str, Any] = {"stages": 3, "policies": SMALL, "apart": apart}
    cluster = EagleCluster(UnitCosts(), target.loaded, eagle, **options)
    one = request(3)
    cluster.submit(one)
    for when in (9.0, 30.0):
        cluster.world.at(when, lambda: cluster.world.cut(*map(Rank, lost)))
        cluster.world.at(when + 3, cluster.connect_all)
    cluster.world.run(until=100_000.0)
    assert cluster.world.finished[one.request].stats["sessions"] == 3
    check(cluster, [one], target)


def test_autoregressive_requests_want_no_features(target: Target, tmp_path: Path) -> None:
    cluster = EagleCluster(
        UnitCosts(), target.loaded, head("eagle", target, tmp_path / "head"), policies=SMALL
    )
    one = request(4, policy="autoregressive")
    cluster.submit(one)
    cluster.world.run(until=100_000.0)
    assert cluster.world.tokens[one.request] == target.greedy(one.prompt, one.max_new_tokens)
    assert not cluster.watched.fed


@pytest.mark.slow
def test_the_bundled_head_accepts_the_same_on_any_number_of_stages() -> None:
    """A round of ``chunked`` does not depend on timing, so neither do its figures."""
    bundled = Loaded(open_checkpoint(BUNDLED_TARGET))
    eagle = load_eagle(BUNDLED_EAGLE, bundled.checkpoint)
    prompt = tuple(Random(0).randrange(300, 1000) for _ in range(12))
    one = ask(0, prompt=prompt, max_new_tokens=40, policy="chunked")
    found = []
    for stages in (1, 2, 4):
        cluster = EagleCluster(UnitCosts(), bundled, eagle, stages=stages, policies=POLICIES)
        cluster.submit(one)
        cluster.world.run(until=100_000.0)
        check(cluster, [one], Target(bundled, bundled.checkpoint, BUNDLED_TARGET))
        stats = cluster.world.finished[0].stats
        found.append((stats["rounds"], stats["hit_rate"], stats["drafted_nodes"]))
    assert found == [found[0]] * 3
    # Chance would be a hit in sixteen or so of 1,024 tokens.
    assert found[0][1] > 0.4
