"""Everything a report can show, by name."""

from __future__ import annotations

from asyncspec.core.errors import UserError
from tools.bench.report.exhibit import Exhibit
from tools.bench.report.exhibits import flowspec, own, pipedec, specpipe

PAPERS = (own, flowspec, specpipe, pipedec)


def choose(only: str | None, stages: int | None, *, real: bool) -> list[Exhibit]:
    """The exhibits of these names (joined by commas), or all. Raises ``UserError``."""
    known = {one.name: one for paper in PAPERS for one in paper.exhibits(stages)}
    if only is None:
        return [one for one in known.values() if not (real and one.virtual)]
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"there is no table or figure {name!r}; there are {', '.join(known)}")
        if real and known[name].virtual:
            raise UserError(f"{name} varies what only the virtual clock has; leave it out")
    return [known[name] for name in names]
