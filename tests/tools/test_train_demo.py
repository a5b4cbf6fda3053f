"""tools/train_demo end to end, in its tiny form, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.train_demo.cli import main

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "under", "old", "house", "and", "said", "never"]


def write_corpus(folder: Path) -> Path:
    """Three short books and sixty sums, made up from a fixed seed."""
    rng = random.Random(5)
    (folder / "books").mkdir(parents=True)
    for title in ("one", "two", "three"):
        lines = [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(150)]
        (folder / "books" / f"{title}.txt").write_text("\n".join(lines))
    sums = [
        f"Question: What is {a} and {a + 3}?\nAnswer: It is {2 * a + 3}.\n#### {2 * a + 3}"
        for a in range(60)
    ]
    (folder / "gsm8k_train.txt").write_text("\n\n".join(sums))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `out` and `work` of one quick run."""
    folder = tmp_path_factory.mktemp("train_demo")
    assert main(arguments(folder, write_corpus(folder / "corpus"))) == 0
    return folder


def arguments(folder: Path, corpus: Path) -> list[str]:
    given = {"corpus": corpus, "out": folder / "out", "work": folder / "work", "tokens": 2500}
    return ["--quick", *(part for k, v in given.items() for part in (f"--{k}", str(v)))]


def test_models_load_with_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "The old dog ran 12 times:\n    for x in y"
    for name, layers in (("demo-target", 2), ("demo-draft", 1)):
        folder = trained / "out" / name
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert model.config.num_hidden_layers == layers
        assert model.config.vocab_size == len(tokenizer) == 384
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
        assert tokenizer.eos_token_id == model.generation_config.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert len(tokenizer("12")["input_ids"]) == 3  # BOS and one token a digit


def test_eagle_head_has_the_published_keys(trained: Path) -> None:
    from safetensors.torch import load_file

    folder = trained / "out" / "demo-eagle"
    config = json.loads((folder / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    assert {k: tuple(v.shape) for k, v in load_file(folder / "model.safetensors").items()} == {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        f"{attention}.q_proj.weight": (hidden, hidden),
        f"{attention}.k_proj.weight": (kv, hidden),
        f"{attention}.v_proj.weight": (kv, hidden),
        f"{attention}.o_proj.weight": (hidden, hidden),
        f"{mlp}.gate_proj.weight": (ffn, hidden),
        f"{mlp}.up_proj.weight": (ffn, hidden),
        f"{mlp}.down_proj.weight": (hidden, ffn),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    assert config["num_hidden_layers"] == 1


def test_a_dflash_head_is_what_the_backend_computes(trained: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from asyncspec.backend.base import SourceSpec
    from asyncspec.plugins.hf.backend import BACKEND
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
    from tools.train_demo.dflash_training import block_logits, build_blocks, read_depths
    from tools.train_demo.recipe import QUICK

    target = trained / "out" / "demo-target"
    given = arguments(trained, trained / "corpus")
    assert main([*given, "--dflash", str(target), "--work", str(trained / "dflash")]) == 0
    metrics = json.loads((trained / "out" / "dflash-metrics.json").read_text())
    levels = [f"level {i + 1}" for i in range(QUICK.block.rows)]
    assert all(metrics["agreement_held_out"]["math"][level]["overlap"] > 0.5 for level in levels)
    path = trained / "out" / "demo-dflash"
    spec = SourceSpec(f"eagle:{path}", open_checkpoint(target), "float32")
    source = BACKEND.load_source(spec).source
    assert isinstance(source, DFlashSource)

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    head = build_blocks(model, QUICK, seed=1)
    head.load_state_dict(load_file(path / "model.safetensors"))
    tokens = torch.arange(3, 33)[None]
    with torch.inference_mode():
        features, _ = read_depths(model, tokens, QUICK.block.depths)
        filled = head(tokens, features, torch.tensor([[20]]))
        behind = tokens[:, None, 20 : 20 + QUICK.block.rows]
        want = block_logits(head, model.lm_head.weight, behind, filled)[0, 0].log_softmax(-1)
        context = source.head.new_context()
        context.append(source.head.context_rows(features[0, :20], torch.arange(20)))
        rows = source.head.fill([context], [int(tokens[0, 20])])[0]
        got = source.head.proposals(rows, behind[0, 0].tolist(), 8)
    for (best, scores), logits in zip(got, want, strict=True):
        assert scores == pytest.approx(logits[best].tolist(), abs=1e-4)
        assert min(scores) >= logits.topk(9).values[-1] - 1e-4


def test_a_finished_run_only_measures_again(trained: Path) -> None:
    before = (trained / "work" / "target.pt").stat().st_mtime_ns
    assert main(arguments(trained, trained / "corpus")) == 0
    assert (trained / "work" / "target.pt").stat().st_mtime_ns == before


def call(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/train_demo", *given]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_it_runs_as_a_directory(tmp_path: Path) -> None:
    ended = call("--corpus", str(tmp_path / "missing"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("train_demo: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.processes
def test_two_workers_train_together(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    ended = call(*arguments(tmp_path, corpus), "--workers", "2")
    assert ended.returncode == 0, ended.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    # Each step is 4 rows of 48 tokens on each of the two.
    target = metrics["training"]["target"]
    assert target["tokens"] == target["step"] * 2 * 4 * 48
