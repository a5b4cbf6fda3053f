"""``python tools/bench record-language``: what a target writes and a draft guesses (simulator).

The target decodes each prompt; the draft is asked at every place of that text, with all that stands
before it. The file is what ``asyncspec simulate --language FILE`` reads
(docs/reference/simulator.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from asyncspec.core.errors import UserError
from asyncspec.core.jobs import Release, SourceJob
from asyncspec.core.sampling import Sampling
from asyncspec.source.registry import kind_of
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    check_draft,
    check_target,
    parts,
)
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.console.bounds import COUNT, SEED
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.node.sources import load_source
from asyncspec_nodes.plugins.simulation.recorded import FORMAT, LanguageHeader, RecordedText
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from tools.bench.options import TEMPERATURE, check_numbers
from tools.bench.prompts import read_sets

Source = Callable[[SourceJob], Expanded | None]

_SESSION = SessionId(0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench record-language``."""
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl prompts")
    parser.add_argument("--per-file", type=int, default=2, help="prompts from each file")
    parser.add_argument("--prompt-characters", type=int, default=400, help="longer ones are cut")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--draft", default=str(BUNDLED_DRAFT), help="a directory, twin or ngram")
    parser.add_argument("--candidates", type=int, default=16, help="kept at every place")
    parser.add_argument("file", type=Path, help="where the language goes")


def run(options: argparse.Namespace) -> int:
    """Record and write."""
    check_numbers(
        options,
        per_file=COUNT,
        prompt_characters=COUNT,
        max_new_tokens=COUNT,
        temperature=TEMPERATURE,
        seed=SEED,
        candidates=COUNT,
    )
    prompts = read_prompts(options)
    header, texts = record(prompts, options)
    watched = track(texts, "texts", total=len(prompts), console=Console(stderr=True))
    write_language(options.file, header, watched)
    return 0


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The first few prompts of every file, cut to what small models can read."""
    sets = read_sets(options.prompts, options.per_file, options.prompt_characters)
    return [prompt.text for prompts in sets.values() for prompt in prompts]


def record(
    prompts: Iterable[str], options: argparse.Namespace
) -> tuple[LanguageHeader, Iterator[RecordedText]]:
    """The header, and the texts one by one. Raises ``UserError``."""
    from asyncspec.backend.reference import decode
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.checkpoint.tokenizer import load_tokenizer
    from asyncspec.plugins.hf.model.stage import load_stage

    model_info = check_target(options.target, 1)
    draft = check_draft(str(options.draft), options.target)
    if any(kind_of(part).reads_features for part in parts(draft)):
        raise UserError(
            f"--draft {draft}: a head reads the target's features, which no recording has; name a "
            "draft model, twin or ngram"
        )
    checkpoint = open_checkpoint(options.target)
    stage = load_stage(checkpoint, 0, model_info.layers)
    tokenizer = load_tokenizer(options.target)
    config = local_config(TargetTable(str(options.target)), DraftTable(source=draft), 1, 1)
    source: Any = load_source(config, checkpoint)
    sampling = Sampling(temperature=options.temperature, seed=options.seed)

    def texts() -> Iterator[RecordedText]:
        for prompt in map(tokenizer.encode, prompts):
            most = min(options.max_new_tokens, model_info.context_length - len(prompt))
            tokens = decode([stage], prompt, most, model_info.eos_token_ids, sampling)
            yield guesses(source.source.run, prompt, tuple(tokens), options.candidates)

    return LanguageHeader(
        FORMAT, options.target.name, Path(draft).name, model_info.vocab_size
    ), texts()


def guesses(
    source: Source, prompt: tuple[int, ...], tokens: tuple[int, ...], count: int
) -> RecordedText:
    """Ask a token source at every place of a text for its ``count`` likeliest tokens."""
    known, fresh = 0, prompt
    candidates: list[tuple[int, ...]] = []
    scores: list[tuple[float, ...]] = []
    for token in tokens:
        answer = source(Expand(_SESSION, Version(0), known, fresh, 1, count, count))
        assert answer is not None
        candidates.append(answer.tokens)
        scores.append(answer.scores)
        known, fresh = known + len(fresh), (token,)
    source(Release(_SESSION))
    return RecordedText(prompt, tokens, tuple(candidates), tuple(scores))


def write_language(path: Path, header: LanguageHeader, texts: Iterable[RecordedText]) -> None:
    """Write a file. Raises ``UserError``."""
    try:
        with path.open("wb") as file:
            file.write(msgspec.json.encode(header) + b"\n")
            file.writelines(msgspec.json.encode(text) + b"\n" for text in texts)
    except OSError as error:
        raise UserError(f"cannot write the language {path}: {error.strerror}") from None
