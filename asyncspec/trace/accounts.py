"""Per request: where the time of each of its tokens went. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.trace.answers import Answers
from asyncspec.trace.critical import Chains, Piece


class TokenTime(Struct, frozen=True):
    """One emission: ``count`` tokens at once, and the pieces since the one before (or since the
    request was submitted), latest first."""

    request: int
    index: int
    count: int
    at: float
    until: float
    pieces: tuple[Piece, ...]


class Account(Struct, frozen=True):
    """A request. Seconds by resource and by (resource, kind); they sum to ``seconds``, the time
    from ``since`` to the last token."""

    request: int
    since: float
    seconds: float
    resources: dict[str, float]
    kinds: dict[str, float]


def token_times(chains: Chains, answers: Answers) -> list[TokenTime]:
    """Every emission of every request, in order."""
    found: list[TokenTime] = []
    before = {number: request.submitted for number, request in answers.requests.items()}
    for i, token in enumerate(answers.tokens):
        if token.depth:
            continue
        count = 1
        while i + count < len(answers.tokens) and answers.tokens[i + count].depth:
            count += 1
        since = before.get(token.request, token.at)
        pieces = chains.back(answers.steps[i], since)
        until = pieces[0].until if pieces else token.at
        before[token.request] = until
        found.append(TokenTime(token.request, token.index, count, since, until, pieces))
    return found


def accounts(times: Sequence[TokenTime], *, decoding: bool) -> list[Account]:
    """Sums over each request; ``decoding``: without its first token."""
    found = []
    for request in sorted({time.request for time in times}):
        mine = [t for t in times if t.request == request and (t.index or not decoding)]
        if mine:
            found.append(_account(request, mine))
    return found


def _account(request: int, times: Sequence[TokenTime]) -> Account:
    resources: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for time in times:
        for piece in time.pieces:
            resources[piece.resource] += piece.seconds  # type: ignore[assignment]
            kinds[f"{piece.resource} {piece.kind}"] += piece.seconds  # type: ignore[assignment]
    since = min(time.at for time in times)
    seconds = max(time.until for time in times) - since
    return Account(request, since, seconds, dict(resources), dict(kinds))
