"""From a finished target to a DFlash head: training, the files, and figures by level."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from .agreement import Tally
from .attention import use_plain_attention
from .checkpoint import Checkpoint
from .dflash_training import block_logits, blocks_loss, build_blocks, read_depths
from .evaluate import spread
from .export import save_blocks
from .pipeline import budget_of, make_setting
from .prepare import Prepared
from .train import Stage, train
from .workers import Group, run_workers

if TYPE_CHECKING:
    from pathlib import Path

    from .dflash import DFlashHead
    from .options import Options

STAGE = "dflash"


def run_dflash(options: Options, target: Path) -> None:
    """Train a head for the model in ``target`` and write it to ``options.out``."""
    _checkpoint(options, target).check()
    run_workers(functools.partial(_train, target), options)


def _train(folder: Path, options: Options, group: Group) -> None:
    setting = make_setting(options, group)
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.to(setting.device).eval().requires_grad_(False)
    if setting.device.type == "cpu":
        use_plain_attention(target)
    recipe = options.recipe
    head = build_blocks(target, recipe, options.seed + 3).to(setting.device)
    loss = functools.partial(blocks_loss, head, target)
    stage = Stage(STAGE, head.train(), loss, budget_of(STAGE, options))
    progress = train(stage, setting, _checkpoint(options, folder))
    if not group.chief:
        return
    save_blocks(head, target.config, options.out / "demo-dflash")
    figures = {
        "training": asdict(progress),
        "agreement_held_out": _agreement(options, head, target),
    }
    notes = options.out / "dflash-metrics.json"
    notes.write_text(json.dumps(figures, indent=1) + "\n")
    Console().print(f"wrote {options.out / 'demo-dflash'}", highlight=False)


def _checkpoint(options: Options, target: Path) -> Checkpoint:
    digest = hashlib.sha256(repr(options.recipe).encode())
    digest.update(repr((budget_of(STAGE, options), options.workers)).encode())
    digest.update(json.loads(Prepared(options.work).notes.read_text())["fingerprint"].encode())
    for path in sorted(target.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return Checkpoint(options.work / f"{STAGE}.pt", digest.hexdigest()[:16])


@torch.no_grad()
def _agreement(options: Options, head: DFlashHead, target: Any) -> dict[str, Any]:
    """By kind of text and level, teacher-forced: a block at every eighth position."""
    found: dict[str, Any] = {}
    recipe, rows = options.recipe, head.size.block.rows
    for kind, stream in Prepared(options.work).load("held_out").items():
        tallies = [Tally() for _ in range(rows)]
        windows = spread(stream, recipe.sample.windows, recipe.context).to(head.norm.weight.device)
        for text in torch.split(windows, 4):
            features, wanted = read_depths(target, text, head.size.block.depths)
            anchors = torch.arange(1, text.shape[1] - rows, 8, device=text.device)
            anchors = anchors.expand(len(text), -1)
            within = anchors[..., None] + torch.arange(rows, device=text.device)
            texts = torch.arange(len(text), device=text.device)[:, None, None]
            given = block_logits(
                head, target.lm_head.weight, text[texts, within], head(text, features, anchors)
            )
            for level, tally in enumerate(tallies):
                choice = wanted[texts, within][..., level, :]
                tally.add(choice.flatten(0, 1), given[..., level, :].flatten(0, 1))
        found[kind] = {f"level {i + 1}": tally.figures() for i, tally in enumerate(tallies)}
    return found
