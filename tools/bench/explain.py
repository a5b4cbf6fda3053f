"""``python tools/bench explain``: where a mix of token sources wins and loses, token by token.

For every token after the first: its rank and chance by the base, by the lookup and by their
mixture, as they stood when they were last asked, and whether it was in the tree. Where the base
ranked it higher than the mixture does, also what the mixture put before it. Then the sums.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import LoadedSource
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import DraftResult
from asyncspec.core.sampling import Sampling
from asyncspec.source.expand import Proposal
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.mixture import MIN_SUCCESSORS, settle
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_protocol.messages import Expand
from tools.bench.hybrid import MIXES
from tools.bench.options import SEVERAL, TEMPERATURE, check_numbers, check_policies
from tools.bench.prompts import read_sets
from tools.bench.report.cell import Ask, Cell, Setting
from tools.bench.report.costs import TURNS
from tools.bench.report.models import Models
from tools.bench.report.virtual import VirtualEngine


class Prediction(Struct, frozen=True):
    """A source's prediction of the token that was verified."""

    # From 0; None where it was not listed.
    rank: int | None
    chance: float


class Place(Struct, frozen=True):
    """One token that came true."""

    token: int
    base: Prediction
    lookup: Prediction
    mix: Prediction
    # Tokens that the mixture ranked before it and the base after it.
    before: tuple[int, ...]


class Listener:
    """Runs a mix, and records the predictions of every verified token."""

    def __init__(self, source: HybridSource) -> None:
        self._source = source
        self.places: list[Place] = []

    def run(self, job: Any) -> DraftResult | None:
        """See ``TokenSource``."""
        if isinstance(job, Expand):
            online = self._source.weights(job.session)
            for one, token in settle(online.pending, job.committed)[1]:
                mixed = online.mix(one, MIN_SUCCESSORS)
                self.places.append(place(token, one.base, one.auxiliary[0], mixed))
        return self._source.run(job)


class ListeningEngine(VirtualEngine):
    """A ``VirtualEngine`` whose mixes are recorded."""

    listener: Listener

    def source(self, label: str) -> LoadedSource:
        """See ``VirtualEngine``."""
        found = super().source(label)
        mix = found.source
        assert isinstance(mix, HybridSource), f"{label} is no mix"
        self.listener = Listener(mix)
        return replace(found, source=self.listener)


def place(token: int, base: Proposal, lookup: Proposal, mixed: Proposal) -> Place:
    """The predictions of ``token``."""
    ours, theirs = prediction(token, mixed), prediction(token, base)
    ahead = mixed[0][: ours.rank] if ours.rank is not None else mixed[0]
    known = base[0][: theirs.rank] if theirs.rank is not None else base[0]
    before = tuple(one for one in ahead if one not in known)
    return Place(token, theirs, prediction(token, lookup), ours, before)


def prediction(token: int, said: Proposal) -> Prediction:
    """Rank and chance of a token."""
    ranks = list(said[0])
    if token not in ranks:
        return Prediction(None, 0.0)
    return Prediction(ranks.index(token), math.exp(said[1][ranks.index(token)]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench explain``."""
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl, a set each")
    parser.add_argument("--set", help="one set alone, by its file's name")
    parser.add_argument("--per-file", type=int, default=1, help="prompts from each file (1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--policy", default="specpipe")
    parser.add_argument("--source", choices=tuple(MIXES), default="hybrid")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Run every prompt once, and print."""
    explained = _explained(options)
    if options.json:
        found = [{"prompt": prompt, "places": places} for prompt, _, places in explained]
        print(json.dumps(msgspec.to_builtins(found)))
        return 0
    for prompt, stats, places in explained:
        print("\n".join((*lines(prompt, places), *sums(stats, places), "")))
    return 0


def _explained(
    options: argparse.Namespace,
) -> Iterator[tuple[str, dict[str, float], list[Place]]]:
    check_numbers(
        options,
        per_file=COUNT,
        max_new_tokens=SEVERAL,
        stages=COUNT,
        temperature=TEMPERATURE,
    )
    check_policies([options.policy])
    sets = read_sets(options.prompts, options.per_file)
    if options.set is not None and options.set not in sets:
        raise UserError(f"there is no set {options.set!r}; there are {', '.join(sets)}")
    engine = ListeningEngine(Models())
    setting = Setting(options.policy, options.source, options.stages, TURNS)
    chosen = [options.set] if options.set else list(sets)
    for prompt in (prompt for name in chosen for prompt in sets[name]):
        ask = Ask(prompt, Sampling(temperature=options.temperature), options.max_new_tokens)
        stats = engine.measure(Cell(ask, setting), engine.target.write(ask))
        yield f"{prompt.set}/{prompt.number}", stats, engine.listener.places


def lines(prompt: str, places: Sequence[Place]) -> Iterator[str]:
    """A table of a prompt's tokens: rank and chance by each; a rank of - is none."""
    yield f"{prompt}: rank and chance by base, lookup and mixture; what the mixture put before it"
    for number, one in enumerate(places):
        said = "  ".join(map(_shown, (one.base, one.lookup, one.mix)))
        yield f"{number:4d} {one.token:6d}  {said}  {' '.join(map(str, one.before))}".rstrip()


def sums(stats: dict[str, float], places: Sequence[Place]) -> Iterator[str]:
    """How often each was right, and how often the one was where the other was not."""
    first: Counter[str] = Counter()
    for one in places:
        right = [name for name in ("base", "lookup") if getattr(one, name).rank == 0]
        first[
            f"{' and '.join(right) or 'neither'}, mixture {'too' if one.mix.rank == 0 else 'not'}"
        ] += 1
    yield f"{len(places)} tokens that were asked for; first choices that came true:"
    yield from (f"{count:5d}  {name}" for name, count in first.most_common())
    names = ("turns", "rounds", "hits", "misses")
    yield ", ".join(f"{stats[name]:g} {name}" for name in names)


def _shown(one: Prediction) -> str:
    return f"{'-' if one.rank is None else one.rank:>2} {one.chance:.3f}"
