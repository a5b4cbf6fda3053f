"""Sizes and rates: everything about a run that is not a path or a budget."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shape:
    """Size of one Llama-style stack."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True)
class Block:
    """What a DFlash head drafts at once, and how it is taught."""

    rows: int  # of a block, each of which proposes a token
    depths: tuple[int, ...]  # of the target, whose outputs it reads
    markov_rank: int
    decay: float  # levels after which a level counts 1 / e of the first
    spacing: int  # one block is taught for so many tokens


@dataclass(frozen=True)
class Sample:
    """How much is measured at the end."""

    windows: int  # held-out rows per kind
    prompts: int  # held-out openings per kind that the target continues
    tokens: int  # length of each continuation


@dataclass(frozen=True)
class Recipe:
    """One complete set of training settings; `rows` of `context` tokens per worker and step.

    Every `long_every`-th step has half as many rows of twice the length.
    """

    target: Shape
    draft: Shape
    dflash: Shape
    block: Block
    vocab: int
    context: int
    max_positions: int
    rows: dict[str, int]  # by stage
    mix: dict[str, float]
    code_files: int | None  # None: all of them
    sample: Sample
    long_every: int = 4
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.02
    warmup: float = 0.03  # fraction of the budget
    held_out_share: float = 0.03
    stage_share: dict[str, float] = field(
        default_factory=lambda: {"target": 0.56, "draft": 0.25, "eagle": 0.19, "dflash": 1.0}
    )


MIX = {"story": 0.65, "math": 0.2, "code": 0.15}

DEMO = Recipe(
    target=Shape(layers=8, hidden=256, heads=4, kv_heads=2, ffn=688),
    # Two layers, because copying (induction) needs two; about a tenth of the target's layer work.
    draft=Shape(layers=2, hidden=160, heads=5, kv_heads=5, ffn=432),
    # As many parameters as the EAGLE head with its embedding.
    dflash=Shape(layers=2, hidden=256, heads=4, kv_heads=2, ffn=256),
    block=Block(rows=10, depths=(2, 5, 8), markov_rank=64, decay=5.0, spacing=8),
    # Short tokens are easier to guess, for the drafters too, and cost less in every softmax.
    vocab=1024,
    context=512,
    max_positions=2048,
    rows={"target": 8, "draft": 4, "eagle": 4, "dflash": 2},
    mix=MIX,
    code_files=None,
    sample=Sample(windows=24, prompts=8, tokens=128),
)

QUICK = Recipe(
    target=Shape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64),
    draft=Shape(layers=1, hidden=16, heads=2, kv_heads=1, ffn=32),
    dflash=Shape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=32),
    block=Block(rows=4, depths=(1, 2), markov_rank=8, decay=4.0, spacing=8),
    vocab=384,
    context=48,
    max_positions=96,
    rows={"target": 4, "draft": 4, "eagle": 4, "dflash": 2},
    mix=MIX,
    code_files=8,
    sample=Sample(windows=2, prompts=2, tokens=12),
)
