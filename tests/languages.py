"""Languages whose prefixes a few lines decide, as grammars and as the plain definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from asyncspec.constraint import text
from asyncspec.constraint.grammar import Grammars, Tokens, Vocabulary
from asyncspec.core.sampling import Sampling

SPELLED = (b"a", b"b", b"c", b"ab", b"ca", b"bb", b"d")
EOS = 7
"""Of a vocabulary of eight tokens."""

GRAMMARS = Grammars(lambda: Vocabulary((*SPELLED, b"<end>"), {EOS}, (EOS,)))


class Words(Struct, frozen=True):
    """Some words in a row, each any number of times, at most ``most`` in all."""

    words: tuple[str, ...]
    most: int

    @property
    def grammar(self) -> str:
        return text.of_regex(f"({'|'.join(self.words)}){{0,{self.most}}}")

    def allowed(self, answer: Sequence[int]) -> list[int] | None:
        """What may follow some tokens, by trying; None after what is no beginning."""
        if EOS in answer:
            return None
        written = b"".join(SPELLED[token] for token in answer).decode()
        if not self._begins(written, self.most):
            return None
        found = [
            token
            for token, spelled in enumerate(SPELLED)
            if self._begins(written + spelled.decode(), self.most)
        ]
        return [*found, EOS] if self._whole(written, self.most) else found

    def _begins(self, written: str, most: int) -> bool:
        if not written:
            return True
        return most > 0 and any(
            word.startswith(written)
            or (written.startswith(word) and self._begins(written[len(word) :], most - 1))
            for word in self.words
        )

    def _whole(self, written: str, most: int) -> bool:
        if not written:
            return True
        return most > 0 and any(
            written.startswith(word) and self._whole(written[len(word) :], most - 1)
            for word in self.words
        )


LANGUAGES = (
    Words(("ab", "c"), 9),
    Words(("abba", "cab", "d"), 30),
    Words(("a", "bb", "dd"), 3),
)
_BY_GRAMMAR = {language.grammar: language for language in LANGUAGES}


def allowed(tokens: Sequence[int], prompt_length: int, how: Sampling) -> Tokens | None:
    """What ``how.constraint`` lets follow a path of the vocabulary of eight; None: anything."""
    constraint, answer = how.constraint, tokens[prompt_length:]
    found: list[int] | None = None
    if constraint.grammar:
        found = _BY_GRAMMAR[constraint.grammar].allowed(answer)
        assert found, "only allowed tokens are decoded"
    if len(answer) < constraint.min_tokens:
        among = range(EOS + 1) if found is None else found
        found = [token for token in among if token not in constraint.stop_tokens] or found
    return None if found is None else np.array(found)
