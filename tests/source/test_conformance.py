"""The conformance suite over every token source that reads no features of a target."""

from __future__ import annotations

import pytest

from asyncspec.backend.base import SourceSpec
from asyncspec.backend.registry import BACKENDS
from asyncspec.core.errors import UserError
from asyncspec.source.base import TokenSource
from asyncspec.source.registry import SOURCES, make_source
from asyncspec.testing.sources import check_source

TOY = "toy:layers=2,vocab=8"


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


@pytest.mark.parametrize("name", [name for name in SOURCES if SOURCES[name].make])
def test_a_setting_is_taken_or_refused(name: str) -> None:
    if not SOURCES[name].takes_setting:
        with pytest.raises(UserError, match=f"{name} takes no setting; write {name} instead of"):
            make_source(f"{name}:5")


def test_no_source_takes_no_setting() -> None:
    with pytest.raises(UserError, match="none takes no setting"):
        make_source("none:5")
