"""Stages on llama.cpp: trees, batches and shared prompts against one row per pass, and every family
against llama.cpp's own text of the whole file."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from asyncspec.backend import kept_results
from asyncspec.backend.base import EngineOptions, Mode, StageBackend, StageOptions, StageSpec
from asyncspec.backend.kept_results import KeptResults
from asyncspec.backend.reference import SESSION, chain, decode
from asyncspec.backend.threads import DEFAULTS
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.core.jobs import Admit, SamplerOutput
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama import devices, library, self_test, trial
from asyncspec.plugins.llama import stage as stages
from asyncspec.plugins.llama.attention import AUTO, OFF, ON, flash_type
from asyncspec.plugins.llama.backend import BACKEND
from asyncspec.plugins.llama.branches import Pool
from asyncspec.plugins.llama.cut import VirtualFile, cut
from asyncspec.plugins.llama.devices import Device
from asyncspec.plugins.llama.draft_model import load_draft
from asyncspec.plugins.llama.gguf_file import Tensor, Value, open_gguf, value
from asyncspec.plugins.llama.passes import Engine
from asyncspec.plugins.llama.stage import TILES, LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec.testing import engines
from asyncspec.testing.engines import MakeStages
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend import gguf_models
from backend.gguf_models import (
    FAMILIES,
    LAYERS,
    convert,
    own_logits,
    quantise,
    save_random,
)
from effort import NIGHTLY, nightly

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
DRAWS = (Sampling(), SAMPLED, Sampling(repetition_penalty=1.4, presence_penalty=0.5))
OPTIONS = EngineOptions(device=os.environ.get("ASYNCSPEC_TEST_DEVICE", "cpu"))
"""``python tools/check_device`` runs these tests on every device of a machine."""

CPU = EngineOptions(device="cpu")
ON_CPU = OPTIONS.device == "cpu"
LEAD = 0.002 if ON_CPU else 0.05
"""Of a token's logit over the next one's."""
NEAR = 0.01 if ON_CPU else 0.05
"""Between log-probabilities."""

PROMPT = [3 + i * 7 % 150 for i in range(40)]


def stages_of(path: Path, count: int) -> list[LlamaStage]:
    target = open_target(path)
    edges = [LAYERS * i // count for i in range(count + 1)]
    return [load_stage(target, *span, options=OPTIONS) for span in pairwise(edges)]


def write(path: Path, metadata: dict[str, Value], tensors: Mapping[str, Tensor]) -> None:
    """A GGUF file with tensors of other files."""
    file = VirtualFile(metadata, tensors)
    data = bytearray(file.size)
    file.read(0, memoryview(data))
    file.close()
    path.write_bytes(data)


@pytest.fixture(scope="module", params=["F16", "Q8_0", "Q4_0"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeStages:
    path = save_random(tmp_path_factory.mktemp("gguf") / "model.gguf", kind=request.param)
    made: dict[int, Sequence[StageBackend]] = {}

    def stages(count: int) -> Sequence[StageBackend]:
        if count not in made:
            made[count] = stages_of(path, count)
        return made[count]

    return stages


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tree_equals_sequential(make: MakeStages, stages: int, how: Sampling) -> None:
    alone: dict[object, list[int]] = {}
    for coalesced in (False, True):
        engines.check_tree_equals_sequential(
            *(make, 16, 0),
            stages=stages,
            length=25,
            sampling=how,
            coalesced=coalesced,
            alone=alone,
        )


@pytest.mark.parametrize("seed", range(2))
def test_a_batch_equals_each_alone(make: MakeStages, seed: int) -> None:
    engines.check_batches_equal_sequential(make, 16, seed, DRAWS)


@pytest.mark.parametrize("seed", range(2))
def test_a_session_begins_like_another(make: MakeStages, seed: int) -> None:
    engines.check_begins_like_another(make, 16, seed)
    engines.check_begins_as_stored(make, 16, seed)
    engines.check_continues_an_answer(make, 16, seed)


def test_the_rest_of_the_suite(make: MakeStages) -> None:
    engines.check_sessions_apart(make, 16)
    engines.check_prompt_needs_no_verdict(make, 16)
    engines.check_release(make)
    engines.check_wire(make)


@pytest.mark.slow
def test_a_whole_model_is_tested_like_its_parts(tmp_path: Path) -> None:
    path = convert(BUNDLED_TARGET, tmp_path / "model.gguf", "Q8_0")
    target = open_target(path)
    spans = (0, 8), (0, 4), (4, 8)
    whole, *parts = (load_stage(target, *span, options=CPU) for span in spans)
    # Equal logits of a quantised head had hidden that a row alone has other hidden states.
    assert whole.engine.settings.min_rows >= max(part.engine.settings.min_rows for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q4_K_M", nightly("Q6_K")])
def test_k_quants(tmp_path: Path, name: str) -> None:
    plain = convert(BUNDLED_TARGET, tmp_path / "plain.gguf")
    target = open_target(quantise(plain, tmp_path / f"{name}.gguf", name))
    assert name[:4] in {tensor.type for tensor in target.model.tensors.values()}
    for count in (1, 2):
        spans = pairwise(range(0, 9, 8 // count))
        made = {count: [load_stage(target, *span, options=OPTIONS) for span in spans]}
        engines.check_tree_equals_sequential(
            made.__getitem__, 1024, 0, stages=count, length=25, sampling=SAMPLED
        )


LONE_ROW = """
import sys
from pathlib import Path
from asyncspec.backend.base import EngineOptions
from asyncspec.plugins.llama.stage import load_stage
from asyncspec.plugins.llama.target import open_target
cpu = EngineOptions(device="cpu")
stage = load_stage(open_target(Path(sys.argv[1])), 0, 1, options=cpu)
print(stage.guarantee, stage.engine.settings.min_rows)
"""
"""In a process of its own: llama.cpp reads once which kernels it may use."""


def test_few_rows_of_k_quants_need_no_more_beside_them(tmp_path: Path) -> None:
    plain = convert(BUNDLED_TARGET, tmp_path / "plain.gguf")
    path = quantise(plain, tmp_path / "Q6_K.gguf", "Q6_K")
    environment = {name: text for name, text in os.environ.items() if name != TILES}
    done = subprocess.run(
        [sys.executable, "-c", LONE_ROW, str(path)], env=environment, capture_output=True, text=True
    )
    guarantee, rows = done.stdout.split()
    assert guarantee == "bitwise", done.stderr
    assert int(rows) <= 2  # one; two where a width fits no blocks, so that weights are F16


@pytest.mark.slow
@pytest.mark.parametrize("faster", [1, 2])
def test_fast_mode_fills_passes_where_that_is_faster(
    faster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_target(convert(BUNDLED_TARGET, tmp_path / "model.gguf"))
    spans, clock = ((0, 4), (4, 8)), self_test._seconds

    def seconds(engine: Engine, given: object) -> float:
        assert clock(engine, given) > 0
        return float(engine.settings.min_rows != faster)

    monkeypatch.setattr(self_test, "_seconds", seconds)
    exact, fast = (
        [load_stage(target, *span, mode=mode, options=CPU) for span in spans]
        for mode in ("exact", "fast")
    )
    assert [stage.engine.settings.min_rows for stage in fast] == [faster] * 2
    assert {stage.guarantee for stage in fast} == {"tolerance"}
    assert decode(fast, PROMPT, 24) == decode(exact, PROMPT, 24)


def test_what_needs_no_bits_has_products_of_matrices(tmp_path: Path) -> None:
    """Where no GPU computes, and unless the user wants flash attention or a quantised cache."""
    path = save_random(tmp_path / "model.gguf")
    target = open_target(path)
    on = replace(CPU, flash_attention="on")
    fast, wanted = (load_stage(target, 0, 2, mode="fast", options=how) for how in (CPU, on))
    exact = load_stage(target, 0, 2, options=CPU)
    draft = load_draft(target, gguf_models.VOCAB, CPU)
    engines = [fast.engine, draft.engine, wanted.engine, exact.engine]
    assert [one.settings.flash for one in engines] == [OFF, OFF, ON, AUTO]
    assert [one.most_rows for one in engines] == [64, 64, 512, 62]
    assert flash_type(replace(CPU, kv_type="q8_0"), "fast", on_gpu=False) == AUTO
    assert flash_type(CPU, "fast", on_gpu=True) == AUTO
    exactly, *fast_ones = (
        BACKEND.footprints(str(path), [(0, 2)], StageOptions(mode=mode, engine=how))[0].scores
        for mode, how in (
            ("exact", CPU),
            ("fast", CPU),
            ("exact", replace(CPU, flash_attention="off")),
        )
    )
    assert min(fast_ones) > exactly


def test_few_sequences_are_enough(make: MakeStages) -> None:
    (stage,) = make(1)
    assert isinstance(stage, LlamaStage)
    pool = stage.engine.pool
    stage.engine.pool = Pool(3)
    try:
        engines.check_tree_equals_sequential(make, 16, 5, stages=1, length=25)
    finally:
        stage.engine.pool = pool


def sure_text(family: str, folder: Path) -> tuple[Path, list[int]]:
    """A model, and what llama.cpp writes with the whole file for as long as it is sure of every
    token: rounding decides where two are as likely."""
    found = []
    for seed in range(9):
        path = save_random(folder / f"{seed}.gguf", family, seed=seed)
        tokens, logits = own_logits(path, PROMPT, 30)
        best = np.sort(logits, -1)
        unsure = best[:, -1] - best[:, -2] <= LEAD
        found.append((int(unsure.argmax()) if unsure.any() else len(tokens), path, tokens))
        if not unsure.any():
            break
    length, path, tokens = max(found)
    assert length >= (30 if ON_CPU else 5)
    return path, tokens[:length]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_llama_cpp_makes_of_the_whole_file(family: str, tmp_path: Path) -> None:
    path, want = sure_text(family, tmp_path)
    for count in (1, 2) if NIGHTLY else (2,):
        stages = stages_of(path, count)
        assert decode(stages, PROMPT, len(want)) == want
        if ON_CPU:
            assert [stage.guarantee for stage in stages] == ["bitwise"] * count
    engines.check_batches_equal_sequential(
        lambda _: stages, 150, 0, (Sampling(), SAMPLED), length=60
    )


def test_log_probabilities_are_those_of_the_whole_file(tmp_path: Path) -> None:
    path = save_random(tmp_path / "model.gguf")
    new, logits = own_logits(path, PROMPT, 8)
    stages = stages_of(path, 2)
    for stage in stages:
        stage.run(Admit(SESSION, 512, Sampling(), top_logprobs=5, log_probs=True))
    known, tokens = 0, PROMPT
    for token, row in zip(new, logits, strict=True):
        hidden = stages[0].run(chain(SESSION, known, tokens, None, ()))
        said = stages[1].run(chain(SESSION, known, tokens, hidden, (len(tokens) - 1,)))
        assert isinstance(said, SamplerOutput)
        log_probs = row - np.logaddexp.reduce(row)
        best = np.argsort(-log_probs)[:5]
        assert said.tokens == (token,)
        assert said.token_log_probs == pytest.approx([log_probs[token]], abs=NEAR)
        ((top, top_log_probs),) = said.top_tokens
        assert top_log_probs == pytest.approx(log_probs[best], abs=NEAR)
        assert top_log_probs == pytest.approx(log_probs[list(top)], abs=NEAR)
        known, tokens = known + len(tokens), [token]


def test_scores_of_a_prompt_are_those_of_the_whole_file(tmp_path: Path) -> None:
    """What the model has written, read as a prompt in two chunks."""
    path = save_random(tmp_path / "model.gguf")
    new, logits = own_logits(path, PROMPT, 12)
    prompt, stages = [*PROMPT, *new], stages_of(path, 2)
    for stage in stages:
        stage.run(Admit(SESSION, 512, Sampling(), prompt_logprobs=2))
    parts = []
    for start, end in ((0, 8), (8, len(prompt))):
        tokens, after = prompt[start:end], prompt[start + 1 : end + 1]
        hidden = stages[0].run(chain(SESSION, start, tokens, None, ()))
        job = chain(SESSION, start, tokens, hidden, ())
        output = stages[1].run(replace(job, scored_tokens=tuple(after)))
        assert isinstance(output, SamplerOutput)
        assert output.prompt_logprobs is not None
        parts.append(output.prompt_logprobs)
    said = [value for part in parts for value in part.log_probs]
    assert len(said) == len(prompt) - 1
    assert [rank for part in parts for rank in part.ranks][-len(new) :] == [1] * len(new)
    scores = [row - np.logaddexp.reduce(row) for row in logits]
    want = [row[token] for row, token in zip(scores, new, strict=True)]
    assert said[-len(new) :] == pytest.approx(want, abs=NEAR)
    likeliest = [value for part in parts for value in part.top_log_probs][-2 * len(new) :]
    best = [value for row in scores for value in np.sort(row)[:-3:-1]]
    assert likeliest == pytest.approx(best, abs=NEAR)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("span", [nightly((0, 2)), nightly((1, 3)), (2, LAYERS)])
def test_the_peak_is_predicted(
    span: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_models, "VOCAB", 100_000)
    path = save_random(tmp_path / "model.gguf", kind="Q8_0")
    done = subprocess.run(
        [sys.executable, "-m", "backend.llama_memory_child", str(path), *map(str, span)],
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | DEFAULTS,
        capture_output=True,
        timeout=250,
    )
    found = json.loads(done.stdout)
    assert 0.6 < found["peak"] / found["predicted"] <= 1, found


def test_a_cut_holds_its_own_tensors_only(tmp_path: Path) -> None:
    model = open_gguf(save_random(tmp_path / "model.gguf"))
    (whole,) = model.files
    metadata, tensors = cut(model, 1, 3)
    own = {name for name, tensor in tensors.items() if tensor.file is not None}
    kinds = {name.removeprefix("blk.0.") for name in model.tensors if name.startswith("blk.0.")}
    assert own == {f"blk.{layer}.{kind}" for layer in (0, 1) for kind in kinds}
    file = VirtualFile(metadata, tensors)
    data = bytearray(file.size)
    assert file.read(0, memoryview(data)) == file.size
    file.close()
    copy = tmp_path / "cut.gguf"
    copy.write_bytes(data)
    stored = open_gguf(copy).tensors["blk.1.ffn_up.weight"]
    source = model.tensors["blk.2.ffn_up.weight"]
    assert (
        data[stored.offset : stored.offset + stored.size]
        == whole.read_bytes()[source.offset : source.offset + source.size]
    )


def test_a_device_is_found_by_its_kind_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Device(i, "cuda", f"CUDA{i}", "a GPU") for i in range(2)]
    monkeypatch.setattr(devices, "gpus", lambda: found)
    wanted = {"cpu": None, "auto": found[0], "cuda": found[0], "cuda1": found[1]}
    assert {name: devices.find(name) for name in wanted} == wanted
    with pytest.raises(UserError, match=r"finds cpu, CUDA0 \(a GPU\), CUDA1"):
        devices.find("metal")
    found.clear()
    assert devices.find("auto") is None


def test_a_cache_in_blocks_needs_heads_of_blocks(tmp_path: Path) -> None:
    target = open_target(save_random(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match="kv_type q8_0 needs heads of a multiple of 32"):
        load_stage(target, 0, 1, options=EngineOptions(kv_type="q8_0"))


def test_repacking_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target(save_random(tmp_path / "model.gguf", kind="Q4_0"))
    monkeypatch.setattr(trial, "_repacked", {})
    found = {}
    for name, program in (("real", sys.executable), ("failing", shutil.which("false"))):
        monkeypatch.setattr(sys, "executable", program)
        trial._repacked.clear()
        stage = load_stage(target, 0, 2, options=CPU)
        assert stage.guarantee == "bitwise"
        found[name] = stage.weights
        # What was found is kept.
        monkeypatch.setattr(sys, "executable", "/nowhere")
        assert load_stage(target, 2, 4, options=CPU).weights == stage.weights
    assert found["failing"] == "Q4_0, llama.cpp on the CPU"
    assert found["real"] in (found["failing"], "Q4_0 repacked, llama.cpp on the CPU")
    plain = open_target(save_random(tmp_path / "plain.gguf"))
    assert load_stage(plain, 0, 2, options=CPU).weights == "F16, llama.cpp on the CPU"


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_stage_from_kept_results(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(kept_results.RETEST, raising=False)
    target = open_target(save_random(tmp_path / "model.gguf", kind="Q8_0"))
    results = KeptResults(tmp_path / "results", ("llama_cpp",))
    tested = load_stage(target, 0, 2, mode=mode, options=CPU, results=results)
    monkeypatch.setattr(stages, "repacks", lambda *arguments: 1 / 0)
    monkeypatch.setattr(stages, "run_tests", lambda *arguments, **how: 1 / 0)
    kept = load_stage(target, 0, 2, mode=mode, options=CPU, results=results)
    assert (kept.engine.settings, kept.guarantee) == (tested.engine.settings, tested.guarantee)
    assert kept.weights == tested.weights
    with pytest.raises(ZeroDivisionError):
        load_stage(target, 0, 3, mode=mode, options=CPU, results=results)


def test_a_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kept_results.RETEST, raising=False)
    target = open_target(save_random(tmp_path / "model.gguf"))
    results = KeptResults(tmp_path / "results", ("llama_cpp",))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        for _ in range(2):  # failures are not kept
            with pytest.raises(CheckpointError):
                trial.ensure_loads(target, 0, 2, results)
    trial.ensure_loads(target, 0, 2, results)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    trial.ensure_loads(target, 0, 2, results)


def test_a_trial_leaves_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried in a child is tried on the CPU."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "cuda:$CUDA_VISIBLE_DEVICES." >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(CheckpointError, match=r"^cuda:\.$"):
        trial.check_loads(tmp_path, 0, 1)


def test_a_build_for_cuda_takes_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(*names: str) -> int:
        built = SimpleNamespace(_lib=SimpleNamespace(**dict.fromkeys(names)))
        monkeypatch.setattr(library, "import_bindings", lambda: built)
        return BACKEND.runtime_bytes

    assert runtime("ggml_backend_cpu_reg", "ggml_backend_cuda_reg") > runtime(
        "ggml_backend_cpu_reg"
    )


@pytest.mark.parametrize(
    ("key", "content", "says"),
    [
        ("block_count", value(4, 9), "9 layers, and tensors of 5"),
        ("block_count", value(4, 0), "0 layers"),
        ("embedding_length", value(8, "x"), "embedding_length cannot be 'x'"),
        ("attention.layer_norm_rms_epsilon", value(6, math.nan), "epsilon cannot be nan"),
        ("attention.head_count", value(4, 3), "llama.cpp cannot load"),
        ("expert_used_count", value(4, 9), r"cannot load this model \(GGML_ASSERT\(n_expert_used"),
    ],
)
def test_a_file_that_contradicts_itself(
    tmp_path: Path, key: str, content: Value, says: str
) -> None:
    model = open_gguf(save_random(tmp_path / "model.gguf", "mixtral"))
    changed = tmp_path / "changed.gguf"
    write(changed, {**model.metadata, f"llama.{key}": content}, model.tensors)

    def load() -> None:
        opened = BACKEND.open(str(changed))
        BACKEND.load(StageSpec(opened, (0, opened.info.layers)))

    with pytest.raises(CheckpointError, match=says):
        load()


def test_a_split_model_is_the_same_model(tmp_path: Path) -> None:
    whole = open_target(save_random(tmp_path / "model.gguf"))
    names = list(whole.model.tensors)
    shards = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for i, shard in enumerate(shards):
        split = {"split.count": value(2, 3), "split.no": value(2, i)}
        metadata = {**whole.model.metadata, **split} if i == 0 else split
        write(shard, metadata, {name: whole.model.tensors[name] for name in names[i::3]})
    parts = open_target(shards[0])
    assert parts.fingerprint == whole.fingerprint
    want = decode(stages_of(whole.path, 1), PROMPT, 12)
    assert decode(stages_of(parts.path, 2), PROMPT, 12) == want
    with pytest.raises(CheckpointError, match=r"is part of a model in 3 files; name the first"):
        open_target(shards[1])
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003.gguf cannot be read"):
        open_target(shards[0])


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = save_random(tmp_path / "model.gguf")
    data = path.read_bytes()
    for broken, message in (
        (b"", "cannot be read|damaged|no GGUF"),
        (b"PK" + data[2:], "no GGUF file"),
        (data[:200], "truncated"),
        (data[:-100], "truncated"),
    ):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=message):
            open_target(path)
