"""The work of several sessions in step: what all of them need next is computed in one pass. Pure.

A course is the work of one session, written down as if it were alone: a generator that yields what
must be computed for it before it can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

W = TypeVar("W")
R = TypeVar("R")

Course = Generator[W, None, R]
"""Yields needs, ends with a result."""


def together(courses: Sequence[Course[W, R]], compute: Callable[[list[W]], None]) -> tuple[R, ...]:
    """Run courses to their ends and return their results in that order. ``compute`` is called once
    a step with the next need of every course that has one, so it is called as often as the longest
    of them alone would call it."""
    results: dict[int, R] = {}
    going = dict(enumerate(courses))
    while going:
        needs: list[W] = []
        for number, course in tuple(going.items()):
            try:
                needs.append(next(course))
            except StopIteration as end:
                results[number] = end.value
                del going[number]
        if needs:
            compute(needs)
    return tuple(results[number] for number in range(len(courses)))


def alone(course: Course[W, R]) -> R:
    """The result of a course that can do without anybody: what it yields is passed over."""
    (result,) = together([course], lambda _: None)
    return result
