"""``python tools/train_demo``: train the bundled target and its draft model. Heads for it, as for
any other target, are trained by ``asyncspec train-head``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from asyncspec.backend.threads import set_thread_defaults  # noqa: E402

set_thread_defaults()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from asyncspec.core.errors import UserError  # noqa: E402
from asyncspec.plugins.hf.training.lesson import mixed_precision  # noqa: E402
from asyncspec.plugins.hf.training.optimizers import optimizers, rate_factor  # noqa: E402
from asyncspec_nodes.console.arguments import Parser  # noqa: E402
from tools.train_demo import corpus, models  # noqa: E402

CONTEXT, ROWS = 512, 8

SHARE = {"demo-target": 0.7, "demo-draft": 0.3}
"""Of the time."""

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 a user's mistake."""
    parser = Parser(prog="train_demo", description=__doc__)
    add = parser.add_argument
    text = "folder with books/*.txt and gsm8k_train.txt"
    add("--corpus", type=Path, required=True, metavar="DIR", help=text)
    text = "folder of *.jsonl prompts that must not be trained on"
    add("--exclude", type=Path, metavar="DIR", help=text)
    add("--out", type=Path, required=True, metavar="DIR", help="where the models go")
    add("--minutes", type=float, default=50.0, help="of training, in all (default: 50)")
    add("--seed", type=int, default=0)
    try:
        options = parser.parse_args(argv)
        texts = corpus.load(options.corpus, options.exclude)
    except UserError as error:
        sys.stderr.write(f"train_demo: {error}\n")
        return 2
    _train_both(options, texts)
    return 0


def _train_both(options: argparse.Namespace, texts: corpus.Corpus) -> None:
    tokenizer = models.train_tokenizer(texts)
    streams = {kind: _stream(tokenizer, documents) for kind, documents in texts.items()}
    target = models.build("demo-target", options.seed)
    draft = models.build("demo-draft", options.seed + 1)

    def next_token(model: Any, rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def as_the_target(model: Any, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(input_ids=rows, use_cache=False).logits.float().softmax(-1)
        logits = model(input_ids=rows, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1))

    for model, name, loss, shards in (
        (target, "demo-target", next_token, 2),
        (draft, "demo-draft", as_the_target, 1),
    ):
        _train(model, name, loss, streams, options)
        model.eval().requires_grad_(False)
        models.save(model, tokenizer, options.out / name, shards)
        model.float()


def _stream(tokenizer: Any, documents: list[str]) -> np.ndarray:
    """All documents end to end, each closed by EOS."""
    encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, models.EOS_ID], np.int64) for one in encoded])


def _train(
    model: Any, name: str, loss: Loss, streams: dict[str, np.ndarray], options: argparse.Namespace
) -> None:
    device = torch.device("cpu")
    seconds, began, said = 60 * options.minutes * SHARE[name], time.monotonic(), 0.0
    tuned = optimizers(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in tuned]
    step, done = 0, 0.0
    while done < 1.0:
        rows = _rows(streams, np.random.default_rng([options.seed, step]))
        model.zero_grad(set_to_none=True)
        with mixed_precision(device):
            value = loss(model, rows)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rates in zip(tuned, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * rate_factor(done)
            optimizer.step()
        step += 1
        passed = time.monotonic() - began
        done = min(1.0, passed / seconds)
        if passed - said > 10 or done == 1.0:
            sys.stderr.write(f"{name} {done:.1%}, step {step}, loss {float(value.detach()):.3f}\n")
            said = passed


def _rows(streams: dict[str, np.ndarray], rng: np.random.Generator) -> torch.Tensor:
    """Windows of random places [rows, context], each behind BOS."""
    rows = np.full((ROWS, CONTEXT), models.BOS_ID, np.int64)
    for row, kind in zip(
        rows, rng.choice([*corpus.MIX], ROWS, p=[*corpus.MIX.values()]), strict=True
    ):
        stream = streams[kind]
        places = rng.integers(len(stream)) + np.arange(CONTEXT - 1)
        row[1:] = stream[places % len(stream)]
    return torch.from_numpy(rows)


if __name__ == "__main__":
    sys.exit(main())
