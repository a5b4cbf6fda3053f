"""The stages in their order: target, draft model, EAGLE head; then figures and files."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from transformers.utils.logging import disable_progress_bar

from .attention import use_plain_attention
from .checkpoint import Checkpoint, Progress
from .distil import draft_loss
from .eagle import EagleHead
from .eagle_training import build_head, eagle_loss
from .evaluate import measure
from .export import export
from .llama import build_llama, next_token_loss
from .prepare import Prepared
from .schedule import Budget
from .tokens import Batches
from .train import Setting, Stage, train
from .workers import Group, run_workers

if TYPE_CHECKING:
    from .options import Options


STAGES = ("target", "draft", "eagle")


def run(options: Options) -> None:
    """Train all three models, measure them and write them to `options.out`."""
    for name in STAGES:
        checkpoint_of(name, options).check()
    run_workers(train_all, options)


def train_all(options: Options, group: Group) -> None:
    """What every worker does; rank 0 also measures and exports."""
    setting = make_setting(options, group)
    recipe = options.recipe
    target: Any = build_llama(recipe.target, recipe.vocab, recipe.max_positions, options.seed)
    target.to(setting.device)
    if setting.device.type == "cpu":
        use_plain_attention(target)
    loss = functools.partial(next_token_loss, target)
    runs = {"target": _train("target", target, loss, options, setting)}
    target.eval().requires_grad_(False)

    draft: Any = build_llama(recipe.draft, recipe.vocab, recipe.max_positions, options.seed + 1)
    draft.to(setting.device)
    if setting.device.type == "cpu":
        use_plain_attention(draft)
    loss = functools.partial(draft_loss, draft, target)
    runs["draft"] = _train("draft", draft, loss, options, setting)

    head = build_head(target, recipe.target, options.seed + 2).to(setting.device)
    loss = functools.partial(eagle_loss, head, target)
    runs["eagle"] = _train("eagle", head, loss, options, setting)
    if group.chief:
        _finish(options, (target, draft, head), runs)


def make_setting(options: Options, group: Group) -> Setting:
    """What the stages of a run share."""
    recipe = options.recipe
    return Setting(
        recipe=recipe,
        batches=Batches(
            Prepared(options.work).load("train"),
            recipe.mix,
            recipe.context,
            recipe.long_every,
            options.seed,
        ),
        group=group,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        console=Console(),
    )


def budget_of(name: str, options: Options) -> Budget:
    """The part of the run's time or tokens that stage `name` gets."""
    # The small models have learnt what they can after half of the target's tokens.
    part = 1.0 if name == "target" else 0.5
    return Budget(
        seconds=60 * options.minutes * options.recipe.stage_share[name],
        tokens=None if options.tokens is None else max(1, int(options.tokens * part)),
    )


def checkpoint_of(name: str, options: Options) -> Checkpoint:
    """The file of one stage, marked with all that its weights depend on.

    Stage by stage, so that another draft model does not cost another target.
    """
    corpus = json.loads(Prepared(options.work).notes.read_text())["fingerprint"]
    before = "" if name == "target" else checkpoint_of("target", options).fingerprint
    recipe = options.recipe
    settings = (
        recipe.draft if name == "draft" else recipe.target,
        (recipe.context, recipe.long_every, recipe.rows[name], sorted(recipe.mix.items())),
        (recipe.muon_rate, recipe.adam_rate, recipe.weight_decay, recipe.warmup),
        (budget_of(name, options), options.workers),
    )
    digest = hashlib.sha256(repr((name, corpus, before, settings)).encode()).hexdigest()[:16]
    return Checkpoint(options.work / f"{name}.pt", digest)


def _train(name: str, model: nn.Module, loss: Any, options: Options, setting: Setting) -> Progress:
    model.train()
    stage = Stage(name, model, loss, budget_of(name, options))
    return train(stage, setting, checkpoint_of(name, options))


def _finish(
    options: Options, models: tuple[Any, Any, EagleHead], runs: dict[str, Progress]
) -> None:
    """Export and measure; a finished run does just this when started again."""
    disable_progress_bar()  # of loading and saving, which take a second
    export(options, *models)
    figures = measure(options)
    report = {
        "training": {name: asdict(progress) for name, progress in runs.items()},
        "settings": {
            "minutes": None if options.tokens is not None else options.minutes,
            "tokens": options.tokens,
            "seed": options.seed,
            "workers": options.workers,
            "torch": torch.__version__,
        },
        "corpus": json.loads(Prepared(options.work).notes.read_text())["kinds"],
        **figures,
    }
    (options.out / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    Console().print(f"wrote {options.out}", highlight=False)
