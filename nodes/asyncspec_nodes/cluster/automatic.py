"""The token source ``auto``: the best of what there is for a target, and why.

Next-token layers come with the target. A head or draft model that is published for it is
used where it is here already, or where the target itself is fetched from a hub. Else the target
drafts for itself in four bits, where there is memory for that. Beside each of them text is looked
up, and alone where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.errors import AsyncSpecError
from asyncspec.core.paths import expanded
from asyncspec.source.registry import MTP_NAME, TWIN_NAME
from asyncspec_nodes.cluster.checkpoints import (
    AUTO,
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    LOOKUPS_ALONE,
    NGRAM,
    parts,
)
from asyncspec_nodes.cluster.config import Config, DraftTable
from asyncspec_nodes.cluster.control_groups import available_memory


class Pair(Struct, frozen=True):
    """A target on the Hub, and what was published to draft for it, best first."""

    target: str
    sources: tuple[str, ...]


PAIRS = (
    Pair("Qwen/Qwen3-8B", ("eagle:RedHatAI/Qwen3-8B-speculator.eagle3", "Qwen/Qwen3-0.6B")),
    Pair("Qwen/Qwen3-14B", ("eagle:RedHatAI/Qwen3-14B-speculator.eagle3", "Qwen/Qwen3-0.6B")),
    Pair("Qwen/Qwen3-32B", ("eagle:RedHatAI/Qwen3-32B-speculator.eagle3", "Qwen/Qwen3-0.6B")),
    Pair("Qwen/Qwen3-30B-A3B", ("eagle:RedHatAI/Qwen3-30B-A3B-speculator.dflash",)),
    Pair(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        ("eagle:RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",),
    ),
    Pair(
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        ("eagle:RedHatAI/Qwen3-235B-A22B-Instruct-2507-speculator.eagle3",),
    ),
    Pair("Qwen/Qwen3-235B-A22B", ("eagle:RedHatAI/Qwen3-235B-A22B-speculator.eagle3",)),
    Pair(
        "meta-llama/Llama-3.1-8B-Instruct",
        (
            "eagle:RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
            "eagle:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "meta-llama/Llama-3.2-1B-Instruct",
        ),
    ),
    Pair(
        "meta-llama/Llama-3.3-70B-Instruct",
        (
            "eagle:RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
            "meta-llama/Llama-3.2-1B-Instruct",
        ),
    ),
    Pair("openai/gpt-oss-20b", ("eagle:RedHatAI/gpt-oss-20b-speculator.eagle3",)),
    Pair("openai/gpt-oss-120b", ("eagle:RedHatAI/gpt-oss-120b-speculator.eagle3",)),
)
"""What is tried for a target of that name; that it fits is checked as of any other source."""

_TWIN_BYTES = 0.6
"""Bytes of a weight, with its scales."""

_MEMORY_SHARE = 0.8
"""Share of what is free, for the weights of a twin and of the stages beside it."""


UNKNOWN = "no head or draft model is known for the target"


class Choice(Struct, frozen=True):
    """A token source as a cluster file names it, and why it was chosen."""

    source: str
    reason: str


def choose(target: str, called: str = "", *, stages_here: float, apart: bool = False) -> Choice:
    """The token source for a target. ``called``: its name as the user gave it, if it is another.
    ``stages_here``: the share of its stages on this machine. ``apart``: several machines have to
    come to the same choice, whatever each of them holds."""
    if Path(target) == BUNDLED_TARGET:
        return _with_lookup(str(BUNDLED_DRAFT), "the bundled target's draft model")
    backend = backend_of(target)
    if _fits(MTP_NAME, target):
        return _with_lookup(MTP_NAME, "the checkpoint has next-token layers")
    if not apart:
        for source in _published(called or target):
            if checked := _fits(source, target):
                return _with_lookup(checked, f"{source} was published for this target")
        if (weights := backend.weight_count(target)) and (twin := _fits(TWIN_NAME, target)):
            # Stages keep at most four bytes of a weight.
            needed = weights * (_TWIN_BYTES + 4 * stages_here)
            if needed <= _MEMORY_SHARE * available_memory():
                return _with_lookup(twin, f"{UNKNOWN}, and there is memory for a twin")
            return Choice(LOOKUPS_ALONE, f"{UNKNOWN}, nor is there memory for a twin")
    return Choice(LOOKUPS_ALONE, UNKNOWN)


def _with_lookup(source: str, reason: str) -> Choice:
    """With n-gram lookup in one tree: where nothing repeats it costs no draft pass, and where
    answers copy it brings up to twice the tokens a turn (docs/results/policies.md)."""
    return Choice(f"{source}+{NGRAM}", f"{reason}, beside lookup")


def resolved(config: Config, *, stages_here: float) -> Config:
    """A cluster file's configuration with what ``auto`` stands for on this machine."""
    if config.draft.source != AUTO:
        return config
    choice = choose(config.target.path, stages_here=stages_here, apart=config.source is not None)
    return replace(config, draft=chosen(config.draft, choice))


def chosen(draft: DraftTable, choice: Choice) -> DraftTable:
    """The table with the source that was chosen."""
    return replace(draft, source=choice.source, chosen=choice.reason)


def source_name(draft: DraftTable) -> str:
    """A source without the folders of its parts."""
    return "+".join(Path(part).name or part for part in parts(draft.source))


def described(draft: DraftTable) -> str:
    """What drafts, for people, and why where it was chosen for them."""
    return source_name(draft) + (f" (auto: {draft.chosen})" if draft.chosen else "")


def _fits(source: str, target: str) -> str | None:
    """A source as a cluster file names it; None where it cannot draft for the target, or is neither
    here nor to be had."""
    try:
        return backend_of_source(source, target).check_source(source, target)
    except AsyncSpecError:
        return None


def _published(target: str) -> Iterator[str]:
    """What was published for a target and may be used."""
    local = expanded(target).is_dir()
    name = target.partition("@")[0]
    last = Path(name).name.lower()
    for pair in PAIRS:
        if name == pair.target or (local and last == pair.target.rpartition("/")[2].lower()):
            for source in pair.sources:
                if not local or backend_of_source(source, target).is_cached(source):
                    yield source
