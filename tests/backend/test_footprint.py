"""Memory from a configuration: against loaded stages, and SpecPipe's Table 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncspec.backend.base import (
    EngineOptions,
    Mode,
    Quantize,
    SourceSpec,
    StageOptions,
    StageSpec,
)
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.model_config import inspect_checkpoint
from asyncspec.plugins.hf.heads.draft_model import DraftModel, load_draft
from asyncspec.plugins.hf.heads.eagle.head import EagleHead
from asyncspec.plugins.hf.heads.eagle.source import load_eagle
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.device import (
    EMULATED,
    EMULATED_PATHS,
    find,
    known_bits,
    known_paths,
    on_accelerator,
)
from asyncspec.plugins.hf.model.footprint import footprint
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from asyncspec.source import ngram
from asyncspec.source.suffix import MAX_TOKENS, TOKEN_BYTES
from asyncspec_nodes.cli import main as cli
from backend.eagle_heads import TARGET, Sizes, State, eagle, eagle3, save
from backend.quantized_checkpoints import PUBLISHED, publish

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
GIB = 2**30
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, int]]:
    assert cli.main(["memory", *argv, "--json"]) == 0
    stages: list[dict[str, int]] = json.loads(capsys.readouterr().out)["stages"]
    return stages


def test_specpipes_table_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """23.5, six times 21.5, 23.5 GiB, with a runtime's 256 MiB; the context budget, which the text
    has lost, is taken for 131,072 tokens: so to 2 %."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    rows = asked(
        capsys, "--target", str(tmp_path), "--stages", "8", "--mode", "fast", "--tree", "64"
    )
    totals = [row["total_bytes"] / GIB + 0.25 for row in rows]
    assert totals == pytest.approx([23.5, *[21.5] * 6, 23.5], rel=0.02)
    assert all(row["tree_bytes"] <= 4 * 2**20 for row in rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2", "mixtral", "qwen3-moe-mixed"])
@pytest.mark.parametrize(("mode", "stored"), [("exact", torch.float16), ("fast", torch.float32)])
def test_a_loaded_stage_has_the_predicted_size(
    family: str, mode: str, stored: torch.dtype, tiny: Callable[..., Path]
) -> None:
    path = tiny(family, dtype=stored)
    checkpoint = open_checkpoint(path)
    layers = checkpoint.info.layers
    for span in ((0, 2), (2, layers), (0, layers)):
        foretold = footprint(path, inspect_checkpoint(path), span, "float32", mode)  # type: ignore[arg-type]
        stage = load_stage(checkpoint, *span, dtype="float32", mode=mode)  # type: ignore[arg-type]
        assert stage.cache_bytes(1) == foretold.slot
        held = sum(t.numel() * t.itemsize for t in stage.shard.model.state_dict().values())
        # Packed matrices are no tensors that could be asked for their size.
        packed = sum(line.weight_bytes for line in stage.shard.linears)
        assert held + packed == stage.shard.weight_bytes
        assert held + packed == pytest.approx(foretold.weights, rel=0.02)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
ACCELERATORS = [EMULATED, EMULATED_PATHS]
"""Devices without and with a product for int4."""


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_stage_on_an_accelerator(device: str, quantize: Quantize, tiny: MakeTiny) -> None:
    check_stage(tiny("llama-tied", **WIDE), device, quantize)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("head_dim", [32, 512])
def test_an_exact_stage_on_an_accelerator(device: str, head_dim: int, tiny: MakeTiny) -> None:
    """A kernel for paths keeps values as they are, but heads may be too wide for it."""
    check_stage(tiny("llama-tied", head_dim=head_dim, **WIDE), device, "none", "exact")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("layout", ["awq", "gptq-2-bits", "gptq-act-order", "w8a16"])
def test_a_quantised_stage_on_an_accelerator(
    device: str, layout: str, tiny: MakeTiny, tmp_path: Path
) -> None:
    path, _ = publish(tiny("llama", **WIDE), tmp_path, PUBLISHED[layout])
    check_stage(path, device, "none")


def check_stage(path: Path, device: str, quantize: Quantize, mode: Mode = "fast") -> None:
    options = StageOptions("bfloat16", mode, quantize, EngineOptions(device=device))
    (foretold,) = BACKEND.footprints(str(path), [(0, 2)], options)
    stage = BACKEND.load(StageSpec(BACKEND.open(str(path)), (0, 2), options))
    assert isinstance(stage, HFStage)
    assert stage.cache_bytes(1) == foretold.slot
    # A kernel's words are padded to whole tiles.
    assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["cpu", *ACCELERATORS])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("name", ["twin:none", "twin:int4", "twin:int8"])
def test_a_source_on_an_accelerator(device: str, family: str, name: str, tiny: MakeTiny) -> None:
    """float16 is computed in float32 there, and kept so."""
    path = tiny(family, dtype=torch.float16, **WIDE)
    foretold = BACKEND.source_footprint(name, str(path), "auto", device)
    spec = SourceSpec(name, BACKEND.open(str(path)), options=EngineOptions(device=device))
    source = BACKEND.load_source(spec).source
    assert isinstance(source, DraftModel)
    assert source.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.1)


def test_devices_of_other_machines() -> None:
    assert known_bits("cuda:7") == known_bits("CUDA7") == {4, 8}
    assert not {4, 8} & (known_bits("rocm") | known_bits("mps") | known_bits("xpu:1"))
    assert known_paths("cuda:7")
    assert known_paths("rocm")
    assert not known_paths("mps")
    assert on_accelerator("metal")
    assert not on_accelerator("CPU")


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma2"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loaded_draft_has_the_predicted_size(
    family: str, stored: torch.dtype, tiny: Callable[..., Path]
) -> None:
    path = tiny(family, dtype=stored)
    info = inspect_checkpoint(path)
    foretold = footprint(path, info, (0, info.layers), "auto", "fast", draft=True)
    model = load_draft(open_checkpoint(path))
    assert model.token_bytes == foretold.slot
    assert model.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.02)


@pytest.mark.parametrize(
    ("state", "layers"),
    [
        (eagle(), 1),
        (eagle(embed=False, qkv_bias=True), 1),
        (eagle3(), 1),
        (eagle3(embed=True), 1),
        (eagle3(Sizes(layers=2)), 2),
    ],
)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", EMULATED])
def test_a_loaded_head_has_the_predicted_size(
    state: State,
    layers: int,
    stored: torch.dtype,
    device: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
) -> None:
    target = open_checkpoint(tiny("llama", dtype=stored, **TARGET))
    halved = {name: tensor.to(stored) for name, tensor in state.items()}
    path = save(tmp_path / "head", halved, Sizes(layers=layers))
    foretold = BACKEND.source_footprint(f"eagle:{path}", str(target.path), "auto", device)
    head = load_eagle(path, target, device=find(device))
    assert head.token_bytes == foretold.slot
    assert held_by(head.head) == pytest.approx(foretold.weights, rel=0.02)


def held_by(head: EagleHead) -> int:
    """Bytes of all weights."""
    parts = [head, *head._layers]
    linears = [x for p in parts for x in vars(p).values() if isinstance(x, RowwiseLinear)]
    embedding = head._embedding.weight
    return sum(x.weight_bytes for x in linears) + embedding.numel() * embedding.itemsize


def test_weights_know_better_than_configurations(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(tiny("llama"), tmp_path / "model")
    argv = ("--target", str(path), "--draft", str(path))
    want = asked(capsys, *argv)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert asked(capsys, *argv) == want
    (path / "model.safetensors").unlink()
    assert asked(capsys, *argv) != want


def test_sizes_of_merged_sources_add_up(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny("llama"))

    def drafts(name: str) -> dict[str, int]:
        assert cli.main(["memory", "--target", path, "--draft", name, "--json"]) == 0
        draft: dict[str, int] = json.loads(capsys.readouterr().out)["draft"]
        return draft

    assert drafts("none")["total_bytes"] == 0
    assert drafts("ngram")["bytes_per_token"] == ngram.TOKEN_BYTES
    assert drafts(f"{path}+ngram")["total_bytes"] == sum(
        drafts(name)["total_bytes"] for name in (path, "ngram")
    )
    assert drafts("auto") == drafts("twin+ngram")
    suffix = drafts("suffix+ngram")
    assert suffix["weights_bytes"] == MAX_TOKENS * TOKEN_BYTES
    assert suffix["bytes_per_token"] == TOKEN_BYTES + ngram.TOKEN_BYTES
    assert drafts(f"{path}+suffix")["total_bytes"] == sum(
        drafts(name)["total_bytes"] for name in (path, "suffix")
    )
    assert drafts(path)["weights_bytes"] > 0


def test_trees_are_as_large_as_the_policys(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--target", str(tiny("llama")), "--stages", "2")
    for options, nodes in (
        ((), 512),
        (("--sessions", "16"), 16 * 512),
        (("--policy", "autoregressive", "--sessions", "16"), 0),
        (("--policy", "pipedec:width=16", "--sessions", "3"), 3 * 32),
        (("--policy", "pipedec:width=16", "--sessions", "3", "--tree", "5"), 5),
    ):
        for row in asked(capsys, *argv, *options):
            assert row["tree_bytes"] == nodes * row["bytes_per_token"]


def test_a_table_for_people(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "--target", str(tiny("llama")), "--stages", "2"]) == 0
    out = capsys.readouterr().out
    assert "V1" in out
    assert "V2" in out
    assert "states" not in out


def test_states_of_sessions_are_shown(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--target", str(tiny("falcon-h1")), "--stages", "2")
    alone, both = (asked(capsys, *argv, "--sessions", n) for n in "12")
    for lone, pair in zip(alone, both, strict=True):
        assert pair["states_bytes"] == 2 * lone["states_bytes"] > 0
        assert pair["cache_bytes"] - lone["cache_bytes"] == lone["states_bytes"]
    assert cli.main(["memory", *argv]) == 0
    assert "of it states" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--stages", "0"], "--stages is 0"),
        (["--stages", "99"], "more than the target's"),
        (["--context", "0"], "--context is 0; it must be at least 1"),
        (["--draft", "eagle:"], "eagle: alone is the bundled target's own head"),
        (["--draft", "none+ngram"], "mixes 'none' with something"),
        (["--sessions", "0"], "--sessions is 0; it must be at least 1"),
        (["--policy", "flowspek"], "unknown policy 'flowspek'"),
        (["--policy", "pipedec:width=0"], "policy pipedec: width"),
    ],
)
def test_invalid_options_are_refused(
    argv: list[str], says: str, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["memory", "--target", str(tiny("llama")), *argv]) == 2
    assert says in capsys.readouterr().err


def test_settings_that_transformers_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LLAMA_70B | {"num_attention_heads": "64"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["memory", "--target", str(tmp_path)]) == 2
    assert "'num_attention_heads' expected int, got str" in capsys.readouterr().err


def test_attention_that_is_not_installed(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a model was trained with says nothing of how it runs here."""
    path = tiny("llama")
    config = json.loads((path / "config.json").read_text())
    config["_attn_implementation"] = "flash_attention_2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert asked(capsys, "--target", str(tmp_path)) == asked(capsys, "--target", str(path))
