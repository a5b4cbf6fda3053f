"""Suffix decoding (SuffixDecoding, arXiv 2411.04975): what followed the longest known end of the
text, in this text or in any earlier answer.

Earlier answers are known to the sessions of the same tenant only (``Expand.tenant``): what is
proposed, and with it the time an answer takes, would tell one tenant what another one was told. The
oldest are forgotten where all of them together exceed ``MAX_TOKENS``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count

from asyncspec.source.lookup import LookupSource, LookupText
from asyncspec.source.registry import SourceKind
from asyncspec_protocol.ids import SessionId

INDEXED = (6, 2)
"""Lengths of the runs of tokens whose occurrences are indexed. The last is the shortest match."""

LATEST = 32
"""Occurrences of a run that are known: the latest ones."""

LONGEST = 64
"""Upper bound on the tokens that are compared."""

MAX_TOKENS = 1 << 17
"""Upper bound on the tokens of earlier answers that are kept."""

TOKEN_BYTES = 512
"""Memory of a token, of an earlier answer or a session, whose runs occur nowhere else."""

Tokens = Sequence[int]
Occurrence = tuple[Tokens, int]
"""A text, and where in it the token stands that follows a run."""


class Occurrences:
    """Where runs of tokens occur in some texts."""

    def __init__(self) -> None:
        # By run: each text's number, and where the next token stands.
        self._found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._texts: dict[int, Tokens] = {}

    @property
    def empty(self) -> bool:
        """Without a text."""
        return not self._texts

    def add(self, number: int, text: Tokens) -> None:
        """A text that may still grow: its runs are to be noted."""
        self._texts[number] = text

    def note(self, number: int, end: int) -> None:
        """The token at ``end`` of a text follows the runs before it."""
        text, occurrence = self._texts[number], (number, end)
        for length in INDEXED:
            if length <= end:
                latest = self._found.setdefault(tuple(text[end - length : end]), [])
                latest.append(occurrence)
                if len(latest) > LATEST:
                    del latest[0]

    def remove(self, number: int) -> None:
        """Forget the oldest text."""
        text = self._texts.pop(number)
        for length in INDEXED:
            for end in range(length, len(text)):
                run = tuple(text[end - length : end])
                left = [one for one in self._found.pop(run, ()) if one[0] != number]
                if left:
                    self._found[run] = left

    def find(self, run: tuple[int, ...]) -> list[Occurrence]:
        """The latest occurrences of a run of an indexed length."""
        return [(self._texts[number], end) for number, end in self._found.get(run, ())]


class EarlierAnswers:
    """Earlier answers of all tenants, ``max_tokens`` tokens at most; a tenant finds only its
    own."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._numbers = count()
        # Oldest first: by number, the tenant and the tokens.
        self._answers: dict[int, tuple[str, Tokens]] = {}
        self._occurrences: dict[str, Occurrences] = defaultdict(Occurrences)
        self.tokens = 0

    def add(self, tenant: str, answer: Tokens) -> None:
        """Remember an answer, if need be its end alone, and forget the oldest ones."""
        # The runs' keys share its numbers.
        answer = tuple(answer[-self._max_tokens :])
        if len(answer) <= INDEXED[-1]:
            return  # nothing in it follows a run
        number = next(self._numbers)
        self._answers[number] = tenant, answer
        self.tokens += len(answer)
        while self.tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))
        occurrences = self._occurrences[tenant]
        occurrences.add(number, answer)
        for end in range(INDEXED[-1], len(answer)):
            occurrences.note(number, end)

    def find(self, tenant: str, run: tuple[int, ...]) -> list[Occurrence]:
        """The latest occurrences of a run in a tenant's answers."""
        occurrences = self._occurrences.get(tenant)
        return [] if occurrences is None else occurrences.find(run)

    def _forget(self, number: int) -> None:
        tenant, answer = self._answers.pop(number)
        self._occurrences[tenant].remove(number)
        self.tokens -= len(answer)
        if self._occurrences[tenant].empty:
            del self._occurrences[tenant]


class _Text(LookupText):
    """A session's tokens, among what else its tenant was answered."""

    def __init__(self, earlier: EarlierAnswers, tenant: str, prompt_length: int) -> None:
        super().__init__()
        self.tenant, self.prompt_length = tenant, prompt_length
        self._earlier = earlier
        self._own = Occurrences()
        self._own.add(0, self.tokens)

    def note(self, token: int) -> None:
        self._own.note(0, len(self.tokens))

    def match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        end = (*self.tokens[-LONGEST:], *path)[-LONGEST:]
        for length in (length for length in INDEXED if length <= len(end)):
            run = end[-length:]
            if occurrences := self._own.find(run) + self._earlier.find(self.tenant, run):
                return _longest(occurrences, end, length)
        return 0, Counter()


def _longest(
    occurrences: list[Occurrence], end: tuple[int, ...], length: int
) -> tuple[int, Counter[int]]:
    """The longest match among occurrences of the last ``length`` tokens of ``end``: its tokens, and
    counts of the tokens that follow."""
    while length < len(end):
        preceding = end[-length - 1]
        longer = [
            one
            for one in occurrences
            if one[1] > length and one[0][one[1] - length - 1] == preceding
        ]
        if not longer:
            break
        occurrences, length = longer, length + 1
    return length, Counter([text[at] for text, at in occurrences])


class SuffixSource(LookupSource[_Text]):
    """Suffix decoding over the session's own text and the tenant's earlier answers."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.earlier = EarlierAnswers(max_tokens)
        super().__init__(lambda job: _Text(self.earlier, job.tenant, job.prompt_length))

    def release(self, session: SessionId) -> None:
        if session in self._sessions:
            _, text = self._sessions[session]
            self.earlier.add(text.tenant, text.tokens[text.prompt_length :])
        super().release(session)


SUFFIX = SourceKind(
    make=SuffixSource,
    remembers=True,
    token_bytes=TOKEN_BYTES,
    shared_bytes=MAX_TOKENS * TOKEN_BYTES,
)
