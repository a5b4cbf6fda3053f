"""An enlarged model says what the original says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncspec.core.errors import UserError
from tools.bench.__main__ import main
from tools.bench.enlarge import DTYPES, Size, enlarge, stored_dtype

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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_weights_are_stored_as_they_are_to_be(
    small: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    enlarge(small, tmp_path / "large", Size(64, 64, 4), dtype)
    assert stored_dtype(tmp_path / "large") == dtype
    assert stored_dtype(small) == torch.float32


def test_nothing_gets_smaller_and_layers_come_in_whole_rounds(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hidden 16 is below the 32 there"):
        enlarge(small, tmp_path / "large", Size(16, 48, 2))
    with pytest.raises(UserError, match="3 layers are no multiple of the 2 there"):
        enlarge(small, tmp_path / "large", Size(32, 48, 3))


def test_the_source_stays_and_a_folder_that_cannot_be_is_one_line(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.read_bytes() for file in small.iterdir()}
    (tmp_path / "link").symlink_to(small)
    for out in (small, tmp_path / "link"):
        assert main(["enlarge", str(out), "--source", str(small), "--hidden", "64"]) == 2
        assert capsys.readouterr().err.endswith("is the source itself; write to another folder\n")
    assert {file.name: file.read_bytes() for file in small.iterdir()} == before
    out = small / "config.json" / "large"
    assert main(["enlarge", str(out), "--source", str(small)]) == 2
    assert f"bench: cannot write {out}: " in capsys.readouterr().err
