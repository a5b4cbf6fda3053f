"""The summary in a terminal."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.summary import summarise
from asyncspec_nodes.plugins.viewer.command import print_summary
from cluster import Cluster, ask
from laws import SMALL, Shaken


def test_text_of_a_trace_is_no_markup_and_no_control(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(Shaken([1]), stages=2, policies=SMALL, record=True)
    cluster.submit(ask())
    cluster.world.run()
    summary = summarise(build(cluster.trace()))
    devices = tuple(replace(one, device=f"[b]{one.device}\x1b") for one in summary.devices)
    print_summary(replace(summary, bottleneck="[/bold] V1\x1b[2J", devices=devices))
    text = capsys.readouterr().out
    assert text.startswith("[/bold] V1\\x1b[2J\n")
    assert "[b]V1\\x1b " in text
    assert "\x1b" not in text
