"""Whether a draft model's tokens are the target's, and what is done where they are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from asyncspec.backend.base import Backend, SourceSpec
from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.source.base import TokenSource
from asyncspec.source.by_text import TextSource
from asyncspec.source.vocabularies import Retokeniser, Vocabulary

D = TypeVar("D", bound=TokenSource)

MAX_DIFFERENT = 128
"""Tokens that may mean different things, as in llama.cpp: reserved ones that one of two models of
a family has given names."""

MAX_SHARE = 16
"""At most one in so many, of small vocabularies."""


def differing_tokens(ours: Mapping[int, str], theirs: Mapping[int, str]) -> tuple[int, ...] | None:
    """The draft's tokens, ascending, that are none of the target's or others. Verification is
    lossless whatever is drafted, so the rest may be. None where too many of the tokens that both
    have differ: then ids mean nothing, and only texts do."""
    if ours == theirs:
        return ()
    shared = ours.keys() & theirs.keys()
    different = sorted(token for token in shared if ours[token] != theirs[token])
    if not shared or len(different) > min(MAX_DIFFERENT, len(shared) // MAX_SHARE):
        return None
    return tuple(sorted({*different, *(theirs.keys() - ours.keys())}))


def load_fitting(
    spec: SourceSpec, backend: Backend, draft: Any, load: Callable[[int, Sequence[int]], D]
) -> tuple[TokenSource, D, float | None]:
    """A draft model as a source for its target, which may be another backend's; the model itself;
    and ``LoadedSource.usable``.

    Arguments:
        backend: the draft model's.
        draft: an ``OpenModel`` of it.
        load: the model, by the number of ids that it may draft and those of them that it may not.
    """
    theirs: Backend = spec.target_backend or backend
    sizes = spec.target.info.vocab_size, draft.info.vocab_size
    foreign = differing_tokens(
        theirs.token_names(str(spec.target.path)), backend.token_names(str(draft.path))
    )
    if foreign is not None:
        model = load(sizes[0], foreign)
        return model, model, None
    source, model = draft_by_text(
        spec.name,
        theirs.load_tokenizer(spec.target),
        backend.load_tokenizer(draft),
        sizes,
        lambda useless: load(sizes[1], useless),
    )
    return source, model, source.usable


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The texts of the first ``size`` tokens."""
    special = {
        tokenizer.spell(token): token for token in range(size) if tokenizer.is_special(token)
    }
    names = {*special.values()}
    texts = [b"" if token in names else tokenizer.spell(token) for token in range(size)]
    return Vocabulary(texts, special)


def draft_by_text(
    name: str,
    target: Tokenizer,
    draft: Tokenizer,
    sizes: tuple[int, int],
    load: Callable[[Sequence[int]], D],
) -> tuple[TextSource, D]:
    """A draft model with another vocabulary than its target's, and the model itself.

    Arguments:
        name: the draft model's, for the log.
        target: the target's tokenizer, which is closed.
        draft: the draft model's, which is closed.
        sizes: of both vocabularies, the target's first.
        load: the draft model, by its tokens that cannot be said in the target's.
    """
    with closing(target), closing(draft):
        ours, theirs = vocabulary(target, sizes[0]), vocabulary(draft, sizes[1])
    to_target = Retokeniser(theirs, ours)
    useless = [token for token in range(sizes[1]) if not to_target.whole(token)]
    usable = 1 - len(useless) / sizes[1]
    logging.getLogger(__name__).warning(
        "the draft model %s has another vocabulary than the target: it drafts by text; %.0f %% of "
        "its tokens are the target's as they are, %.0f %% in several",
        name,
        100 * to_target.agreeing,
        100 * (usable - to_target.agreeing),
    )
    model = load(useless)
    return TextSource(model, theirs, ours, usable), model
