"""A certified bound: no plan with that many batches can bring more.

Relaxed are the batches themselves: every user is verified as if alone in one (no waiting for the
slower, no padding, a pass of its own rows), and the verifier needs the users' own rows in sum, with
the fixed cost once a batch. Lengths may be fractions where the verifier limits. The fixed cost
makes the bound fall with the number of batches, so it ends the scan.
"""

from __future__ import annotations

from asyncspec.dipsd.tables import Tables


def upper_bound(tables: Tables, batches: int, enough: float = 0.0) -> float:
    """Tokens a ms that no plan with ``batches`` batches or more exceeds.

    Above ``enough`` it may be looser than it could be: only whether it is matters there.
    """
    return min(
        _bound_by_stage(tables, slope, fixed * batches, enough)
        for slope, fixed in zip(tables.slopes, tables.fixed, strict=True)
    )


def _bound_by_stage(tables: Tables, slope: float, fixed: float, enough: float) -> float:
    """The bound if of all stages only this one could be busy all the time."""
    rows = [tables.row(prefix) for prefix in tables.prefix]
    ready = sorted(
        (tables.draft[m][k] + tables.passing(rows[m][k]), k, m)
        for m in range(tables.users)
        for k in range(1, tables.longest + 1)
    )
    steps = _steps(tables, rows)
    reach = [0] * tables.users
    tokens = work = best = 0.0
    entered = 0
    for period, k, m in ready:
        entered += k == 1
        tokens += tables.gain[m][k] - (tables.gain[m][k - 1] if k > 1 else 0.0)
        work += rows[m][k] - rows[m][k - 1]
        reach[m] = k
        if entered < tables.users or tokens / period <= max(best, enough):
            continue
        if slope * work + fixed <= period:
            best = max(best, tokens / period)
        else:
            best = max(best, _filled(tables, rows, steps, reach, period, slope, fixed))
    return max(best, enough)


Step = tuple[float, float, float, int, int]
"""(minus tokens a FLOP, tokens, FLOPs, user, length) of one more drafted token."""


def _steps(tables: Tables, rows: list[list[float]]) -> list[Step]:
    steps: list[Step] = []
    for m, row in enumerate(rows):
        for k in range(2, tables.longest + 1):
            tokens, work = tables.gain[m][k] - tables.gain[m][k - 1], row[k] - row[k - 1]
            steps.append((-tokens / work, tokens, work, m, k))
    # A user's own steps come in the order of their lengths: each brings less and costs more.
    steps.sort()
    return steps


def _filled(
    tables: Tables,
    rows: list[list[float]],
    steps: list[Step],
    reach: list[int],
    period: float,
    slope: float,
    fixed: float,
) -> float:
    """The best ratio at ``period`` or later when the verifier limits: the best steps first."""
    tokens = sum(gain[1] for gain in tables.gain)
    needed = slope * sum(row[1] for row in rows) + fixed
    best = tokens / max(period, needed)
    for _, more, work, m, k in steps:
        if k > reach[m]:
            continue
        then = needed + slope * work
        if needed < period < then:
            part = (period - needed) / (then - needed)
            best = max(best, (tokens + part * more) / period)
        tokens, needed = tokens + more, then
        best = max(best, tokens / max(period, needed))
    return best
