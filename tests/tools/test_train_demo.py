"""tools/train_demo: the models it writes, what it leaves out of its texts, and mistakes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tools.train_demo.corpus import cut

pytestmark = [pytest.mark.nightly, pytest.mark.torch]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "under", "old", "house", "and", "said", "never"]


def write_corpus(folder: Path) -> Path:
    """Three short books and sixty sums, made up from a fixed seed."""
    rng = random.Random(5)
    (folder / "books").mkdir(parents=True)
    for title in ("one", "two", "three"):
        lines = [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(150)]
        (folder / "books" / f"{title}.txt").write_text("\n".join(lines))
    sums = [f"Question: What is {a} and 3?\nAnswer: It is {a + 3}." for a in range(60)]
    (folder / "gsm8k_train.txt").write_text("\n\n".join(sums))
    return folder


def test_models_load_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tools.train_demo.__main__ import main

    given = ["--corpus", str(write_corpus(tmp_path / "corpus")), "--out", str(tmp_path)]
    assert main([*given, "--minutes", "0.001"]) == 0
    text = "The old dog ran 12 times:\n    for x in y"
    for name, layers in (("demo-target", 8), ("demo-draft", 2)):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        assert model.config.num_hidden_layers == layers
        assert model.config.vocab_size == len(tokenizer) == 1024
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
        assert tokenizer.eos_token_id == model.generation_config.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert len(tokenizer("12")["input_ids"]) == 3  # BOS and one token a digit


def test_a_missing_corpus_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.train_demo.__main__ import main

    assert main(["--corpus", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("train_demo: ")


def test_passages_of_prompts_are_cut_out() -> None:
    prompt = " ".join(f"w{i}" for i in range(12))
    run = tuple(prompt.split())
    assert (
        cut(f"Before it. {prompt.upper()}, then. After it.", {run})
        == "Before it.\n, then. After it."
    )
    assert cut("Nothing of it.", {run}) == "Nothing of it."
