"""What ``asyncspec demo`` shows: two answers side by side as they come, what their nodes do, and
how they compare."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from asyncspec_nodes.console.output import harmless

COLUMN_SECONDS = 0.040
"""Seconds of a column of the lanes."""

LATE_SECONDS = 0.35
"""By which passes are known: nodes deliver their traces a few times a second."""

FRAMES = 10
"""A second."""

LINES = 12
"""Lines of an answer that are shown while it comes."""


class Lane:
    """One way to answer: its text, its speed, and when its nodes were at work, the draft node
    first."""

    def __init__(
        self, title: str, stages: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title = title
        self.stages = stages
        self._clock = clock
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.reason = ""
        self.stats: Mapping[str, float] = {}
        self._first: float | None = None
        self._ended: float | None = None
        self._passes: list[list[tuple[float, float]]] = [[] for _ in range(stages + 1)]

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        """Tokens have come."""
        if self._first is None and token_ids:
            self._first = self._clock()
        self.text += text
        self.token_ids += tuple(token_ids)

    def ran(self, rank: int, at: float, until: float) -> None:
        """A node was at work, by the monotonic clock that processes of a machine share."""
        if rank < len(self._passes):
            self._passes[rank].append((at, until))

    def end(self, reason: str, stats: Mapping[str, float]) -> None:
        """The answer is whole, for that reason."""
        self.reason, self.stats, self._ended = reason, stats, self._clock()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first a second, so far; 0 before the second."""
        if self.reason:
            return self.stats.get("tokens_per_second", 0.0)
        if self._first is None or len(self.token_ids) < 2:
            return 0.0
        return (len(self.token_ids) - 1) / max(1e-9, self._clock() - self._first)

    def chart(self, columns: int) -> list[str]:
        """A line for each node: the last moments, a column each, marked where it was at work."""
        end = (self._ended or self._clock()) - LATE_SECONDS * (self._ended is None)
        end -= end % COLUMN_SECONDS  # else what is drawn would flicker
        begin = end - columns * COLUMN_SECONDS
        lines = []
        for rank, passes in enumerate(self._passes):
            marks = ["·"] * columns
            for at, until in reversed(passes):
                if until < begin:
                    break
                first = max(0, round((at - begin) / COLUMN_SECONDS))
                last = max(first + 1, round((until - begin) / COLUMN_SECONDS))
                for column in range(first, min(last, columns)):
                    marks[column] = "█" if rank else "D"
            lines.append(f"{f'stage {rank}' if rank else 'draft':8}{''.join(marks)}")
        return lines


class Race:
    """Two ways to answer one question, the slower one first."""

    def __init__(
        self,
        *,
        prompt: str,
        model: str,
        pace: str,
        lanes: tuple[Lane, Lane],
        max_tokens: int,
        chat: bool,
    ) -> None:
        self.prompt = prompt
        self.model = model
        self.pace = pace
        self.lanes = lanes
        self.max_tokens = max_tokens
        self.chat = chat

    @property
    def equal(self) -> bool:
        """Whether both answers are the same, token by token."""
        plain, flow = self.lanes
        return plain.token_ids == flow.token_ids

    @property
    def opening(self) -> list[str]:
        """What is about to happen."""
        asked = "Question" if self.chat else "The text to continue"
        return [self.pace, f"Model: {self.model}", f"{asked}: {self.prompt}"]

    @property
    def sentence(self) -> str:
        """How they compare, as measured in this run."""
        plain, flow = self.lanes
        pairs = zip(plain.token_ids, flow.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        count = max(len(plain.token_ids), len(flow.token_ids))
        speeds = f"{flow.tokens_per_second:.1f} against {plain.tokens_per_second:.1f} tokens/s"
        if not plain.tokens_per_second:
            return f"{same} of {count} tokens the same; too few to measure a speed"
        times = flow.tokens_per_second / plain.tokens_per_second
        return f"{times:.1f} times as fast ({speeds}), {same} of {count} tokens the same"

    @property
    def closing(self) -> list[str]:
        """The sentence, why the answer ends where it does, and what to type next."""
        cut = self.lanes[1].reason == "length"
        return [
            f"{self.sentence}.",
            *(
                [f"Both answers are cut at {self.max_tokens} tokens (-n N changes that)."]
                if cut
                else []
            ),
            'Your own model: asyncspec run MODEL "question", MODEL being a directory, a .gguf file '
            "or ORG/NAME",
            "Several machines: asyncspec up; the page in a browser: asyncspec serve",
        ]


@asynccontextmanager
async def show(race: Race, console: Console | None = None) -> AsyncIterator[None]:
    """Inside, both answers are shown as they come: on a terminal side by side, else at the end and
    one below the other. Leaving without an error says how they compare."""
    console = console or Console(highlight=False, markup=False)
    for line in race.opening:
        console.print(line)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            drawing = asyncio.create_task(_draw(race, console, live))
            try:
                yield
            finally:
                drawing.cancel()
                live.update(picture(race, console.width), refresh=True)
    else:
        yield
        for lane in race.lanes:
            console.print(f"\n{lane.title}, {lane.tokens_per_second:.1f} tokens/s:")
            console.print(harmless(lane.text).strip(), soft_wrap=True)
    console.print()
    for line in race.closing:
        console.print(line, soft_wrap=True)


async def _draw(race: Race, console: Console, live: Live) -> None:
    while True:
        live.update(picture(race, console.width), refresh=True)
        await asyncio.sleep(1.0 / FRAMES)


def picture(race: Race, width: int) -> RenderableType:
    """Both lanes as they are now, side by side where there is room."""
    half = width // 2 - 1 if width >= 80 else width
    return Columns([_panel(lane, half) for lane in race.lanes], padding=(0, 1))


def _panel(lane: Lane, width: int) -> Panel:
    inner = width - 4
    text = Text(harmless(lane.text).strip())
    shown = text.wrap(Console(width=inner), inner)[-LINES:]
    blank = [Text("")] * (LINES - len(shown))
    speed = Text(f"{lane.tokens_per_second:5.1f} tokens/s", style="bold")
    speed.append(f"   {len(lane.token_ids)} tokens{', done' if lane.reason else ''}", style="dim")
    chart = [Text(line, style="cyan", no_wrap=True) for line in lane.chart(inner - 8)]
    return Panel(Group(speed, *chart, Text(""), *shown, *blank), title=lane.title, width=width)
