"""The conformance suite over every token source."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncspec.backend.base import SourceSpec
from asyncspec.backend.registry import BACKENDS
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import TensorRows
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.plugins.toy.source import ToyEagle
from asyncspec.source.base import TokenSource
from asyncspec.source.registry import SOURCES, make_source
from asyncspec.testing.sources import check_source
from asyncspec_protocol.messages import FINAL

TOY = "toy:layers=2,vocab=8"
MODEL = ToyModel(layers=2, vocab=8)


def new_source(name: str) -> TokenSource:
    """A source without what it was told before."""
    if SOURCES[name].make:
        return make_source(name)
    backend = BACKENDS["toy"]
    return backend.load_source(SourceSpec(name, backend.open(TOY, tokenizer=False))).source


@pytest.mark.parametrize(
    "name",
    [name for name in SOURCES if SOURCES[name].proposes and not SOURCES[name].reads_features],
)
def test_every_source_conforms(name: str) -> None:
    check_source(lambda: new_source(name))


def toy_features(text: Sequence[int]) -> TensorRows:
    """What a toy target's last stage hands over for all but the last token."""
    model, state, rows = MODEL, MODEL.start(), []
    for token in text[:-1]:
        state = model.extend(state, token)
        rows.append(model.feature(state, (FINAL,)))
    return TensorRows(rows, tuple(range(len(rows))))


def test_a_source_that_reads_features_conforms() -> None:
    check_source(lambda: ToyEagle(MODEL, (FINAL,)), features=toy_features)


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].make])
def test_a_setting_is_taken_or_refused(name: str) -> None:
    if not SOURCES[name].takes_setting:
        with pytest.raises(UserError, match=f"{name} takes no setting; write {name} instead of"):
            make_source(f"{name}:5")


def test_no_source_takes_no_setting() -> None:
    with pytest.raises(UserError, match="none takes no setting"):
        make_source("none:5")
