"""What a level of each token source's trees costs, as the table of sources states it."""

from __future__ import annotations

import pytest

from tools.bench.report.models import Models
from tools.bench.report.source_table import source_rows
from tools.bench.report.table import Table, Value


@pytest.mark.nightly
@pytest.mark.torch
def test_the_source_table_has_a_price_of_every_source() -> None:
    values = {"ALT": Value(0.5), "ALR": Value(2.0), "accuracy": Value(0.75)}
    sources = ("ngram", "eagle+suffix")
    table = Table("", "", sources, tuple(values), dict.fromkeys(sources, values), ("alt",))
    lookup, mixed = source_rows(table, Models())
    assert lookup.keys() == mixed.keys()
    assert (mixed["source"], mixed["acceptance"]) == ("eagle+suffix", 0.75)
    assert all(float(row["level, ms"]) > 0 for row in (lookup, mixed))
