"""From exhibits to results: what is to be measured, what is known already, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from rich.progress import Progress

from tools.bench.report.cell import Ask, Cell, Stats, key
from tools.bench.report.models import Models
from tools.bench.report.store import Store
from tools.bench.report.workers import Job, measure, spread, write


class Identity(Struct, frozen=True):
    """What beside a cell itself decides its result."""

    code: str
    # By their part: target, draft, eagle.
    models: Mapping[str, str]
    # For real processes: of which machine.
    machine: str

    def of(self, cell: Cell) -> str:
        """The key of a cell's result."""
        asked = _parts(cell.setting.source)
        models = [
            name for name in ("target", "draft", "eagle") if name == "target" or name in asked
        ]
        parts = [self.code, *(self.models[name] for name in models)]
        if cell.setting.engine == "real":
            parts.append(self.machine)
        return key(cell, *parts)

    def asked(self, ask: Ask) -> str:
        """The key of an answer."""
        return key(ask, self.code, self.models["target"])


def _parts(source: str) -> Sequence[str]:
    return ("draft",) if source == "hybrid" else source.split("+")


class Plan:
    """Cells, each once whatever tables it is part of, and where their results go."""

    def __init__(
        self, cells: Iterable[Cell], identity: Identity, store: Store, commit: str
    ) -> None:
        self.cells = {identity.of(cell): cell for cell in cells}
        self._identity = identity
        self._store = store
        self._commit = commit

    def missing(self) -> dict[str, Cell]:
        """What is not known yet, by key."""
        return {name: cell for name, cell in self.cells.items() if name not in self._store}

    def run(self, models: Models, jobs: int, progress: Progress) -> None:
        """Measure what is missing. Results are kept one by one."""
        missing = self.missing()
        asks = self._unanswered(missing.values())
        if asks:
            task = progress.add_task("the target's texts", total=len(asks))
            for ask, answer in spread(jobs, write, models, asks):
                self._store.add(self._identity.asked(ask), answer)
                progress.advance(task)
        task = progress.add_task("cells", total=len(self.cells))
        progress.advance(task, len(self.cells) - len(missing))
        for job, found in spread(jobs, measure, models, list(self._jobs(missing.values()))):
            for cell, stats in zip(job.cells, found, strict=True):
                self._keep(cell, stats)
                progress.advance(task)

    def result(self, cell: Cell) -> Stats:
        """What a cell has brought, once it was run."""
        stats: Stats = self._store[self._identity.of(cell)]
        return stats

    def _keep(self, cell: Cell, stats: Stats) -> None:
        about = {
            "commit": self._commit,
            "prompt": f"{cell.ask.prompt.set}/{cell.ask.prompt.number}",
            "setting": cell.setting,
            "sampling": cell.ask.sampling,
        }
        self._store.add(self._identity.of(cell), stats, **about)

    def _unanswered(self, cells: Iterable[Cell]) -> list[Ask]:
        virtual = [cell for cell in cells if cell.setting.engine == "virtual"]
        asks = chain.from_iterable((cell.ask, *cell.earlier) for cell in virtual)
        unknown = {self._identity.asked(ask): ask for ask in asks}
        return [ask for name, ask in unknown.items() if name not in self._store]

    def _jobs(self, cells: Iterable[Cell]) -> Iterator[Job]:
        real: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.setting.engine == "virtual":
                asks = (cell.ask, *cell.earlier)
                texts = [tuple(self._store[self._identity.asked(ask)]) for ask in asks]
                yield Job((cell,), (texts[0],), tuple(texts[1:]))
            else:
                # One cluster for all prompts.
                shared = key(cell.setting, str(cell.ask.sampling), str(cell.ask.tokens))
                real.setdefault(shared, []).append(cell)
        yield from (Job(tuple(cells)) for cells in real.values())
