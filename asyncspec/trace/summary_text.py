"""The summary of a trace for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from asyncspec.trace.analysis.critical_path import LatencyBreakdown
from asyncspec.trace.analysis.summary import Summary

_SHARES = ("useful", "wrong", "dead", "drafting", "cache", "sending", "credit", "idle")


def print_summary(summary: Summary, console: Console) -> None:
    """The sentence, then the tables behind it."""
    console.print(f"[bold]{summary.bottleneck}[/bold]\n", highlight=False)
    console.print(
        f"{summary.tokens} tokens, {summary.rounds} rounds, {summary.misses} misses, "
        f"{summary.tokens_per_round:.2f} tokens a round, hit rate {summary.hit_rate:.0%}, "
        f"{summary.rows_in_flight:.1f} rows in flight\n",
        highlight=False,
    )
    console.print(_devices(summary))
    if summary.decoding:
        console.print(_path(summary.decoding))
    console.print(_print_acceptance(summary))
    console.print(_print_hops(summary))
    for clock in summary.clocks:
        if clock.probes:
            console.print(
                f"clock of rank {clock.rank}: within {clock.uncertainty * 1e3:.2f} ms "
                f"({clock.probes} probes, drift {clock.drift * 1e6:+.0f} ppm)",
                highlight=False,
            )
    for rank, count in summary.dropped:
        console.print(f"rank {rank} lost {count} events", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _devices(summary: Summary) -> Table:
    table = _table("Utilisation of the time in which requests ran", "device", "busy", *_SHARES)
    for device in summary.devices:
        shares = (f"{getattr(device, name):.0%}" for name in _SHARES)
        table.add_row(device.device, f"{device.busy:.0%}", *shares)
    return table


def _path(requests: Sequence[LatencyBreakdown]) -> Table:
    """What the tokens after the first waited for, all requests together."""
    total = sum(breakdown.seconds for breakdown in requests) or 1.0
    kinds: dict[str, float] = {}
    for breakdown in requests:
        for kind, seconds in breakdown.kinds.items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    table = _table("Where the tokens' time went (decoding)", "work", "seconds", "share")
    for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1]):
        if seconds / total >= 0.005:
            table.add_row(kind, f"{seconds:.3f}", f"{seconds / total:.0%}")
    return table


def _print_acceptance(summary: Summary) -> Table:
    table = _table("Tokens by depth below the tip", "depth", "tokens", "in the tree")
    for depth in summary.acceptance:
        table.add_row(f"{depth.depth}", f"{depth.tokens}", f"{depth.hits / depth.tokens:.0%}")
    return table


def _print_hops(summary: Summary) -> Table:
    table = _table("Links", "hop", "frames", "bytes", "bytes a token")
    for hop in summary.hops:
        row = (hop.hop, f"{hop.frames}", f"{hop.nbytes:,}", f"{hop.bytes_per_token:,.0f}")
        table.add_row(*row)
    return table
