"""Drawing a token: the right distribution, a function of its inputs, transformers' filters."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import sampling_reference as plain
from asyncspec.backend.sampling import (
    Logits,
    best_successors,
    draw,
    draw_row,
    gumbels,
    kept,
    log_probs_of,
    penalised,
    uniforms,
)
from asyncspec.core import rng
from asyncspec.core.sampling import MIN_TEMPERATURE, NOTHING, Sampling, seen

pytestmark = pytest.mark.torch

# Multiples of a quarter, so that ties are common.
LOGITS = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=1, max_size=40)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 4.0]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.25, 0.75]),
    }
)


def rows_of(*rows: list[float]) -> Logits:
    return np.array(rows, np.float32)


@given(seed=st.integers(0, 2**70), position=st.integers(0, 2**31))
@example(seed=0x260CB1A2FC837597, position=0)
def test_noise_is_that_of_rng_bit_for_bit(seed: int, position: int) -> None:
    tokens = np.array([0, 1, 7, 151_935, 2**31 - 1])
    assert uniforms(seed, position, tokens).tolist() == [
        rng.uniform(seed, position, int(token)) for token in tokens
    ]
    assert gumbels(seed, position, tokens) == pytest.approx(
        [plain.gumbel(seed, position, int(token)) for token in tokens], rel=1e-14
    )


@given(LOGITS, SAMPLINGS, st.integers(0, 1000))
def test_the_winner_by_definition(logits: list[float], how: Sampling, position: int) -> None:
    tokens, scores = kept(np.array(logits), how)
    value = {
        int(t): float(s) + plain.gumbel(how.seed, position, int(t))
        for t, s in zip(tokens, scores, strict=True)
    }
    best = max(value, key=lambda t: value[t])
    assert draw_row(np.array(logits), position, how) == best


@given(
    st.lists(st.integers(-(2**20), 2**20).map(lambda x: x / 64), min_size=1, max_size=40),
    st.one_of(st.sampled_from([5e-324, 1e-308, 1e-300, 1e-5, 1e308]), st.floats(0, 1e308)),
    SAMPLINGS,
)
def test_no_temperature_is_too_low_or_too_high(
    logits: list[float], temperature: float, how: Sampling
) -> None:
    how = replace(how, temperature=temperature)
    (token,) = draw(rows_of(logits), [3], how)
    assert token == plain.choose(logits, NOTHING, 3, how)
    if temperature < MIN_TEMPERATURE:
        assert token == logits.index(max(logits))
    else:
        assert all(math.isfinite(score) for score in plain.kept(logits, how).values())


@given(LOGITS)
def test_greedy_takes_the_lowest_of_the_best(logits: list[float]) -> None:
    (token,) = draw(rows_of(logits), [3], Sampling())
    assert token == logits.index(max(logits))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.2, 2),
    top_k=st.integers(0, 30),
    # Closer to 1 transformers' sum, from the other end, rounds differently.
    top_p=st.one_of(st.just(1.0), st.floats(0.1, 0.9999)),
    min_p=st.floats(0, 0.5),
)
def test_filters_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)).double() * 2
    filters = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        filters.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        filters.append(TopPLogitsWarper(top_p))
    if min_p:
        filters.append(MinPLogitsWarper(min_p))
    want = torch.isfinite(filters(torch.zeros(1, 1, dtype=torch.long), logits))[0]
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = kept(logits[0].numpy(), how)
    assert sorted(tokens.tolist()) == torch.nonzero(want)[:, 0].tolist()


@given(st.data(), SAMPLINGS, PENALTIES, st.booleans())
def test_the_fast_way_is_the_definition(
    data: st.DataObject, how: Sampling, penalties: dict[str, float], greedy: bool
) -> None:
    rows = data.draw(st.lists(LOGITS.map(lambda x: (x * 40)[:40]), min_size=1, max_size=3))
    # Sums of weights may round differently in the two, which matters at the very end.
    how = replace(how, top_p=min(how.top_p, 0.99), min_p=min(how.min_p, 0.99), **penalties)
    how = replace(how, temperature=0.0) if greedy else how
    prompt = data.draw(st.lists(st.integers(0, 39), max_size=6))
    answer = data.draw(st.lists(st.integers(0, 39), max_size=6))
    own = [data.draw(st.lists(st.integers(0, 39), max_size=4)) for _ in rows]
    committed = seen([*prompt, *answer], len(prompt))
    texts = [seen([*prompt, *answer, *line], len(prompt)) for line in own]
    lines = [{t: seen[t] for t in line} for seen, line in zip(texts, own, strict=True)]
    got = draw(rows_of(*rows), range(7, 7 + len(rows)), how, committed, lines)
    assert list(got) == [
        plain.choose(row, seen, 7 + i, how)
        for i, (row, seen) in enumerate(zip(rows, texts, strict=True))
    ]


@given(
    seed=st.integers(0, 2**32),
    penalties=PENALTIES,
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=20),
    answer=st.lists(st.integers(0, 49), max_size=20),
)
def test_penalties_are_those_of_transformers_and_vllm(
    seed: int, penalties: dict[str, float], prompt: list[int], answer: list[int]
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)).double() * 2
    how = Sampling(**penalties)  # type: ignore[arg-type]
    got = penalised(logits.numpy(), {}, [seen(prompt + answer, len(prompt))], how)
    repeated = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)
    want = repeated(torch.tensor([prompt + answer]), logits)
    times = torch.zeros(1, 50).double()
    times.scatter_add_(
        1, torch.tensor([answer], dtype=torch.long), torch.ones(1, len(answer)).double()
    )
    want = want - how.frequency_penalty * times
    want = want - how.presence_penalty * (times > 0)
    assert torch.equal(torch.from_numpy(got), want)


def test_a_large_vocabulary_takes_the_short_way_to_the_same_nucleus() -> None:
    random = np.random.default_rng(0)
    for spread in (0.0, 0.3, 3.0):
        logits = random.normal(size=20_000) * spread
        tokens, _ = kept(logits, Sampling(temperature=1.0, top_p=0.9))
        order = np.lexsort((np.arange(len(logits)), -logits))
        mass = np.cumsum(np.exp(logits[order]))
        count = int(np.searchsorted(mass, 0.9 * mass[-1])) + 1
        assert abs(len(tokens) - count) <= 1
        assert set(tokens.tolist()) <= set(order[: count + 1].tolist())


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_k=5, seed=2),
        Sampling(temperature=1.5, top_p=0.8, min_p=0.05, seed=3),
    ],
)
def test_over_positions_it_is_the_softmax(how: Sampling) -> None:
    random = Random(how.seed)
    logits = np.array([random.gauss(0, 1.5) for _ in range(12)])
    count = 20_000
    drawn = np.bincount([draw_row(logits, p, how) for p in range(count)], minlength=12)
    tokens, scores = kept(logits, how)
    share: npt.NDArray[np.float64] = np.zeros(12)
    share[tokens] = np.exp(scores - scores.max())
    share /= share.sum()
    possible = share > 0
    assert drawn[~possible].sum() == 0
    expected = share[possible] * count
    chi_square = float(((drawn[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty: a value this large has a chance below one in 10,000.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit
    assert np.abs(drawn / count - share).sum() / 2 < 0.02


def test_rows_do_not_see_each_other() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 30), np.float32)
    how = Sampling(temperature=0.9, seed=4)
    together = draw(logits, range(10, 15), how)
    alone = [draw(logits[i : i + 1], [10 + i], how)[0] for i in range(5)]
    assert list(together) == alone


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, 1.0])


@given(st.lists(ODD, min_size=1, max_size=20), SAMPLINGS, st.booleans())
def test_logits_that_are_no_numbers_draw_some_token(
    logits: list[float], sampling: Sampling, penalised: bool
) -> None:
    """A byzantine stage before this one, or a broken checkpoint, ends no node."""
    if penalised:
        sampling = replace(sampling, repetition_penalty=1e6, presence_penalty=-2.0)
    own = [{0: 1}] if penalised else ()
    (token,) = draw(rows_of(logits), [3], sampling, path_counts=own)
    assert 0 <= token < len(logits)
    real = [x for x in logits if math.isfinite(x) and abs(x) < 1e38]
    if real and not penalised and not any(abs(x) > 1e38 for x in logits if not math.isnan(x)):
        assert math.isfinite(logits[token])


@pytest.mark.parametrize("vocab", [1, 40, 5_000, 70_001])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_best_successors_are_those_of_a_sort(vocab: int, levels: int) -> None:
    """Also where many are as good, and where some logits are no numbers."""
    random = np.random.default_rng(vocab)
    logits = (random.integers(levels, size=(3, vocab)) / levels).astype(np.float32)
    most = min(32, vocab)
    found = best_successors(logits, 32)
    for row, (tokens, log_probs) in zip(logits, found, strict=True):
        best = np.sort(row)[::-1][:most]
        np.testing.assert_array_equal(row[list(tokens)], best)
        assert len(set(tokens)) == most
        normed = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        np.testing.assert_allclose(log_probs, normed[list(tokens)], atol=1e-5)
        assert tuple(log_probs) == log_probs_of(np.repeat(row[None], most, 0), list(tokens))
    logits[0, vocab // 2] = np.nan
    assert len(best_successors(logits, 32)[0][0]) == most
    assert best_successors(logits[:1], 0) == [([], [])]
