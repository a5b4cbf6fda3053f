"""The package's own tests: each of its objects conforms.

Run with ``python -m pytest conformance.py`` where the package is installed.
"""

from __future__ import annotations

from example_plugin.dialect import DIALECT
from example_plugin.policy import PAIRS
from example_plugin.source import RepeatSource

from asyncspec.testing.dialects import check_dialect
from asyncspec.testing.engines import check_engine
from asyncspec.testing.policies import check_policy
from asyncspec.testing.sources import check_source


def test_the_policy() -> None:
    check_policy(PAIRS)


def test_the_source() -> None:
    check_source(lambda: RepeatSource(7))


def test_the_engine() -> None:
    check_engine("example:layers=4,vocab=16", seeds=1)


def test_the_dialect() -> None:
    bodies = {"/example/complete": [{"prompt": "abc", "max_tokens": 4}]}
    check_dialect(DIALECT, bodies)
