"""The names of token sources: ``DIR``, ``eagle:DIR``, ``ngram``, ``none``, and mixes with ``+``."""

from __future__ import annotations

from collections.abc import Callable

from asyncspec.errors import UserError

EAGLE = "eagle:"
"""Before the name of an EAGLE head."""

NGRAM = "ngram"
NONE = "none"
WITHOUT_MODEL = (NGRAM, NONE)

HYBRID = "hybrid"
"""The default draft model and n-gram lookup, in one tree."""

_PLUS = "+"


def parts(name: str) -> tuple[str, ...]:
    """The names of the sources a mix is made of. Raises ``UserError`` for a mix that cannot be."""
    found = tuple(name.split(_PLUS))
    if len(found) == 1:
        return found
    wrong = next((part for part in found if not part or part in (NONE, HYBRID)), None)
    if wrong is not None:
        raise UserError(f"{name!r} mixes {wrong or 'nothing'!r} with something; leave it out")
    if len(set(found)) < len(found):
        raise UserError(f"{name!r} names a token source twice; leave one out")
    if sum(part.startswith(EAGLE) for part in found) > 1:
        raise UserError(f"{name!r} mixes two EAGLE heads; only one can read the target's features")
    return found


def each(name: str, change: Callable[[str], str]) -> str:
    """The name with each of its parts changed. Raises as ``parts``."""
    return _PLUS.join(change(part) for part in parts(name))
