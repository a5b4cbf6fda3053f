"""The summary of a trace as tables in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from asyncspec.trace.analysis.summary import Summary

_SHARES = ("useful", "wrong", "dead", "drafting", "cache", "sending", "credit", "idle")


def print_summary(summary: Summary, console: Console) -> None:
    """The bottleneck, then the tables behind it."""
    console.print(f"[bold]{summary.bottleneck}[/bold]\n", highlight=False)
    console.print(
        f"{summary.tokens} tokens, {summary.rounds} rounds, {summary.misses} misses, "
        f"{summary.tokens_per_round:.2f} tokens a round, hit rate {summary.hit_rate:.0%}, "
        f"{summary.rows_in_flight:.1f} rows in flight\n",
        highlight=False,
    )
    devices = (
        [one.device, f"{one.busy:.0%}", *(f"{getattr(one, share):.0%}" for share in _SHARES)]
        for one in summary.devices
    )
    title = "Utilisation of the time in which requests ran"
    console.print(_table(title, ("device", "busy", *_SHARES), devices))
    if summary.decoding:
        title = "Where the tokens' time went (decoding)"
        console.print(_table(title, ("work", "seconds", "share"), _decoding(summary)))
    depths = ([f"{d.depth}", f"{d.tokens}", f"{d.hits / d.tokens:.0%}"] for d in summary.acceptance)
    title = "Tokens by depth below the tip"
    console.print(_table(title, ("depth", "tokens", "in the tree"), depths))
    hops = (
        [hop.hop, f"{hop.frames}", f"{hop.nbytes:,}", f"{hop.bytes_per_token:,.0f}"]
        for hop in summary.hops
    )
    console.print(_table("Links", ("hop", "frames", "bytes", "bytes a token"), hops))
    for clock in summary.clocks:
        if clock.probes:
            console.print(
                f"clock of rank {clock.rank}: within {clock.uncertainty * 1e3:.2f} ms "
                f"({clock.probes} probes, drift {clock.drift * 1e6:+.0f} ppm)",
                highlight=False,
            )
    for rank, count in summary.dropped:
        console.print(f"rank {rank} lost {count} events", highlight=False)


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _decoding(summary: Summary) -> Iterable[list[str]]:
    """What the tokens after the first waited for, all requests together; from half a percent on."""
    total = sum(breakdown.seconds for breakdown in summary.decoding) or 1.0
    kinds: Counter[str] = Counter()
    for breakdown in summary.decoding:
        kinds.update(breakdown.kinds)
    for kind, seconds in kinds.most_common():
        if seconds / total >= 0.005:
            yield [kind, f"{seconds:.3f}", f"{seconds / total:.0%}"]
