"""What ``tools/soak`` calls more and more, and an answer as it must be; ``make soak`` runs it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.soak.load import _is_answer
from tools.soak.machines import MAX_GROWTH, Sample, grown

END = 400.0


def samples(*memory: float, first: float = 0.0) -> list[Sample]:
    step = (END - first) / len(memory)
    return [
        Sample(first + step * place, {"MiB": mib, "files": 20.0, "threads": 3.0})
        for place, mib in enumerate(memory, start=1)
    ]


@given(st.lists(st.floats(100, 100 + MAX_GROWTH["MiB"]), min_size=40, max_size=60))
def test_what_stays_within_the_bound_is_level(memory: list[float]) -> None:
    assert grown(samples(*memory), 0.0, END) == {}


def test_the_first_quarter_may_grow_and_the_rest_may_not() -> None:
    warm = [100.0 + 10 * place for place in range(10)]
    assert grown(samples(*warm, *([200.0] * 30)), 0.0, END) == {}
    found = grown(samples(*(100.0 + 2 * place for place in range(40))), 0.0, END)
    assert found.keys() == {"MiB"}
    early, late = found["MiB"]
    assert late - early > MAX_GROWTH["MiB"]
    # One that was there for a short time has only warmed up.
    assert grown(samples(*(100.0 + 9 * place for place in range(20)), first=300.0), 0.0, END) == {}


@pytest.mark.parametrize(
    ("status", "end", "text", "problem"),
    [
        (200, "stop", '{"n": 1, "ok": true}', ""),
        (200, "length", '{"n": 1', ""),
        (200, "stop", '{"n": 1}', "not as the schema says"),
        (503, "stop", "", "503"),
    ],
)
def test_an_answer_by_a_schema(status: int, end: str, text: str, problem: str) -> None:
    body = {"choices": [{"finish_reason": end, "text": text}]}
    found = _is_answer(status, body, lambda choice: str(choice["text"]))
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
