"""The command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError
from .recipe import DEMO, QUICK, Recipe

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    corpus: Path
    exclude: Path | None
    out: Path
    work: Path
    minutes: float
    tokens: int | None
    seed: int
    workers: int
    fresh: bool
    # The target of a DFlash head that is to be trained, and nothing else.
    dflash: Path | None
    recipe: Recipe


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message)


def parser() -> argparse.ArgumentParser:
    """The argument parser, also used for the help text."""
    p = _Parser(prog="train_demo", description="Train asyncspec's bundled demo models.")
    add = p.add_argument
    add("--corpus", type=Path, required=True, help="folder with books/*.txt and gsm8k_train.txt")
    add("--exclude", type=Path, help="folder of *.jsonl prompts that must not be trained on")
    add("--out", type=Path, default=ROOT / "asyncspec" / "models", help="where the models go")
    add("--work", type=Path, default=ROOT / "build" / "train_demo", help="checkpoints and tokens")
    add("--minutes", type=float, default=50.0, help="training time, all stages together")
    add("--tokens", type=int, help="train the target on so many tokens instead: repeatable exactly")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=1, help="data-parallel processes of one thread each (CPU)")
    add("--fresh", action="store_true", help="forget an earlier, interrupted run")
    add("--dflash", type=Path, metavar="TARGET", help="only a DFlash head for this model")
    add("--quick", action="store_true", help="tiny models in seconds, to see that it works")
    return p


def parse(argv: list[str] | None = None) -> Options:
    """Options from `argv`; raises `UserError` for what makes no sense."""
    a = parser().parse_args(argv)
    if a.minutes <= 0:
        raise UserError("--minutes must be above 0")
    if a.tokens is not None and a.tokens <= 0:
        raise UserError("--tokens must be above 0")
    if not 1 <= a.workers <= 16:
        raise UserError("--workers must be between 1 and 16")
    if a.exclude is not None and not a.exclude.is_dir():
        raise UserError(f"--exclude: no folder {a.exclude}")
    if a.dflash is not None and not (a.dflash / "tokenizer.json").is_file():
        raise UserError(f"--dflash: no model with a tokenizer.json in {a.dflash}")
    tokens = a.tokens
    if a.quick and tokens is None:
        tokens = 20_000
    return Options(
        corpus=a.corpus,
        exclude=a.exclude,
        out=a.out,
        work=a.work,
        minutes=a.minutes,
        tokens=tokens,
        seed=a.seed,
        workers=a.workers,
        fresh=a.fresh,
        dflash=a.dflash,
        recipe=QUICK if a.quick else DEMO,
    )
