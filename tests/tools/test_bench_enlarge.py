"""An enlarged model says what the original says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.bench.enlarge import Size, enlarge

pytestmark = pytest.mark.nightly

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param,
        **SMALL,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize(
    "size", [Size(32, 200, 2), Size(32, 48, 6), Size(128, 48, 2), Size(72, 100, 4)], ids=str
)
def test_the_logits_stay(small: Path, tmp_path: Path, size: Size) -> None:
    enlarge(small, tmp_path / "large", size, torch.float32)
    models = [AutoModelForCausalLM.from_pretrained(p) for p in (small, tmp_path / "large")]
    text = torch.arange(20)[None] * 7 % 64
    with torch.inference_mode():
        one, other = (model(text).logits for model in models)
    assert models[1].config.num_hidden_layers == size.layers
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert models[1].num_parameters() > models[0].num_parameters()
