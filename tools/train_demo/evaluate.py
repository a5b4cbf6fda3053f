"""The figures of the model card, measured on the exported files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .agreement import Tally, Trio, agreement
from .eagle_training import build_head
from .llama import next_token_loss, parameter_count
from .prepare import Prepared
from .tokenizer import EOS_ID
from .tokens import Stream, window

if TYPE_CHECKING:
    from pathlib import Path

    from .options import Options
    from .recipe import Sample

SAMPLE_PROMPTS = (
    "Once upon a time there was a little girl who",
    "Question: Tom has 3 apples and buys 5 more. How many apples does he have now?\nAnswer:",
    "def read_lines(path):\n",
)
PROMPT = 32  # tokens of a held-out text before the target goes on by itself


def load_trio(options: Options) -> Trio:
    """The three exported models in float32."""

    def causal(name: str) -> Any:
        path = options.out / name
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    target = causal("demo-target")
    head = build_head(target, options.recipe.target, seed=0).eval()
    head.load_state_dict(load_file(options.out / "demo-eagle" / "model.safetensors"))
    return Trio(target, causal("demo-draft"), head.requires_grad_(False))


def measure(options: Options) -> dict[str, Any]:
    """Held-out losses, agreement of the drafters with the target, sizes and sample texts."""
    recipe, trio = options.recipe, load_trio(options)
    held_out = Prepared(options.work).load("held_out")
    losses: dict[str, Any] = {}
    forced: dict[str, dict[str, Tally]] = {}
    own: dict[str, dict[str, Tally]] = {}
    for kind, stream in held_out.items():
        rows = spread(stream, recipe.sample.windows, recipe.context)
        losses[kind] = {"target": _loss(trio.target, rows), "draft": _loss(trio.draft, rows)}
        forced[kind] = agreement(trio, rows, torch.ones_like(rows, dtype=torch.bool))
        for temperature in (0.0, 0.8):
            text, counted = own_text(trio.target, stream, recipe.sample, temperature)
            own[f"{kind} T={temperature:g}"] = agreement(trio, text, counted)
    _print(forced, own)
    return {
        "parameters": _sizes(trio),
        "bytes": {p.name: _bytes(p) for p in sorted(options.out.glob("demo-*"))},
        "held_out_loss_nats_per_token": losses,
        "agreement_held_out": _figures(forced),
        "agreement_own_text": _figures(own),
        "samples": samples(options, trio.target),
    }


def spread(stream: Stream, count: int, length: int) -> torch.Tensor:
    """`count` windows at even distances over a held-out stream, [count, length]."""
    step = max(1, (len(stream.ids) - length) // count)
    return torch.stack([window(stream, i * step, length) for i in range(count)])


def own_text(
    target: Any, stream: Stream, sample: Sample, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts the target continues from held-out openings, and which positions it wrote.

    Returns rows [prompts, length] and a mask of the same shape: true where the next token was
    chosen by the target and the text has not ended before.
    """
    openings = spread(stream, sample.prompts, min(PROMPT, sample.tokens))
    rows = generate(target, openings, sample.tokens, temperature, seed=1)
    ended = (rows == EOS_ID).long().cumsum(-1) > 0
    ended[:, : openings.shape[1]] = False
    counted = ~ended
    counted[:, : openings.shape[1] - 1] = False
    counted[:, -1] = False
    return rows, counted


@torch.no_grad()
def generate(
    target: Any, rows: torch.Tensor, tokens: int, temperature: float, seed: int
) -> torch.Tensor:
    """Continue `rows` by up to `tokens` tokens, greedily at temperature 0."""
    torch.manual_seed(seed)
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    out: torch.Tensor = target.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=tokens, **how
    )
    return out


def samples(options: Options, target: Any) -> list[dict[str, str]]:
    """Continuations of three fixed prompts, greedy and at temperature 0.8."""
    tokenizer: Any = AutoTokenizer.from_pretrained(options.out / "demo-target")
    found = []
    for prompt in SAMPLE_PROMPTS:
        rows = tokenizer(prompt, return_tensors="pt")["input_ids"]
        entry = {"prompt": prompt}
        for name, temperature in (("greedy", 0.0), ("temperature_0.8", 0.8)):
            out = generate(target, rows, options.recipe.sample.tokens // 2, temperature, seed=0)
            entry[name] = tokenizer.decode(out[0, rows.shape[1] :], skip_special_tokens=True)
        found.append(entry)
    return found


@torch.no_grad()
def _loss(model: Any, rows: torch.Tensor) -> float:
    losses = [float(next_token_loss(model, part)) for part in torch.split(rows, 4)]
    return round(math.fsum(losses) / len(losses), 3)


def _sizes(trio: Trio) -> dict[str, int]:
    embedding = trio.head.embed_tokens.weight.numel()
    return {
        "target": parameter_count(trio.target),
        "draft": parameter_count(trio.draft),
        "eagle": parameter_count(trio.head),
        "eagle_without_embedding": parameter_count(trio.head) - embedding,
    }


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


def _figures(tallies: dict[str, dict[str, Tally]]) -> dict[str, Any]:
    return {k: {name: t.figures() for name, t in by.items()} for k, by in tallies.items()}


def _print(forced: dict[str, dict[str, Tally]], own: dict[str, dict[str, Tally]]) -> None:
    table = Table("text", "drafter", "top-1", "top-4", "top-8", "overlap")
    for title, tallies in {**{f"held-out {k}": t for k, t in forced.items()}, **own}.items():
        for name, tally in tallies.items():
            row = tally.figures()
            table.add_row(title, name, *(f"{row[k]:.3f}" for k in list(row)[:4]))
    Console().print(table)
