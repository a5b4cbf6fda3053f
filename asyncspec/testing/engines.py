"""What every ``StageBackend`` must do, whatever computes: the suite takes a way to make stages.

The yardstick is the engine itself, run sequentially: one new row per pass, no speculation. A
tree's true path, cut in random segments among random other branches, pruned and compacted at
random and on each stage at another time, must lead to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, cast

from asyncspec.backend.base import StageBackend, StageSpec
from asyncspec.backend.registry import backend_of
from asyncspec.core.jobs import Admit, Export, Forward, Import, Release, Row, TensorRows, Trim
from asyncspec.core.sampling import Sampling
from asyncspec.testing.pipeline import (
    SESSION,
    Pipeline,
    Walk,
    alone,
    answer_each,
    sequential,
    together,
)
from asyncspec_protocol.ids import NO_PARENT, NodeId, SegmentId, SessionId

MakeStages = Callable[[int], Sequence[StageBackend]]
"""A whole pipeline, cut in so many stages."""

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_p=0.95, seed=11),
    Sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
)


def check_engine(target: str, seeds: int = 2) -> None:
    """Check the engine of a target: its stages, on one device, against themselves run row by row.

    Arguments:
        target: a model's name as users write it, of at least two layers; a small one suffices.
        seeds: random texts for each law.

    Raises:
        AssertionError: it breaks a law.
        UserError: the target cannot be opened.
    """
    backend = backend_of(target)
    info, model = backend.check_target(target), backend.open(target, tokenizer=False)

    def make(count: int) -> Sequence[StageBackend]:
        edges = [info.layers * stage // count for stage in range(count + 1)]
        return [backend.load(StageSpec(model, span)) for span in pairwise(edges)]

    vocab = info.vocab_size
    for seed in range(seeds):
        for stages in range(1, 1 + min(3, info.layers)):
            for sampling in SAMPLINGS:
                check_tree_equals_sequential(make, vocab, seed, stages=stages, sampling=sampling)
        check_tree_equals_sequential(make, vocab, seed, coalesced=True)
        check_batches_equal_sequential(make, vocab, seed, SAMPLINGS)
        if info.shares_prefixes:
            check_begins_like_another(make, vocab, seed)
            check_begins_as_stored(make, vocab, seed)
        if info.shares_prefixes or info.keeps_states:
            check_continues_an_answer(make, vocab, seed)
    check_sessions_apart(make, vocab)
    check_prompt_needs_no_verdict(make, vocab)
    check_release(make)
    check_wire(make)


def check_drawn(stages: Sequence[StageBackend], got: object, want: object) -> None:
    """The tokens are the same where the stages are ``bitwise``. Where they are not, most of them
    are: rounding decides between tokens that are about as likely."""
    if all(stage.guarantee == "bitwise" for stage in stages):
        assert got == want
        return
    pairs = list(zip(_flat(got), _flat(want), strict=True))
    assert sum(mine == other for mine, other in pairs) >= _AGREEMENT * len(pairs), (got, want)


_AGREEMENT = 0.8
"""Least share of equal tokens; of rows that see others than their ancestors it is a tenth."""


def _flat(drawn: object) -> Iterator[object]:
    if isinstance(drawn, list | tuple):
        for item in drawn:
            yield from _flat(item)
    else:
        yield drawn


def check_tree_equals_sequential(
    make: MakeStages,
    vocab: int,
    seed: int,
    *,
    stages: int = 2,
    length: int = 40,
    sampling: Sampling | None = None,
    coalesced: bool = False,
    alone: dict[object, list[int]] | None = None,
) -> None:
    """The law: a token drawn inside a tree is the token drawn without one. ``alone``: what was
    drawn without one of the same model, however it was cut, which is looked up and entered."""
    random = Random(seed)
    prompt = random.randint(1, 2 * length)
    tokens = [random.randrange(vocab) for _ in range(prompt + length)]
    pipeline, alone = make(stages), {} if alone is None else alone
    key = (*tokens, prompt, sampling)
    if key not in alone:
        alone[key] = sequential(pipeline, tokens, prompt, sampling)
    want = alone[key]
    widest = random.choice([1, 4, 16]) if not coalesced else 16
    walk = Walk(tokens, prompt, vocab, random, widest=widest, coalesced=coalesced)
    check_drawn(pipeline, walk.run(pipeline, sampling), want)


def check_sessions_apart(make: MakeStages, vocab: int) -> None:
    """Two sessions, their passes in turn, are two separate ones."""
    stages = make(2)
    texts = [[Random(i).randrange(vocab) for _ in range(12)] for i in range(2)]
    want = [sequential(stages, text, 4) for text in texts]
    pipelines = [Pipeline(stages, SessionId(10 + i)) for i in range(2)]
    got: list[list[int]] = [[], []]
    for pipeline, text in zip(pipelines, texts, strict=True):
        pipeline.read(text[:4])
    for i in range(4, 12):
        for pipeline, text, drawn in zip(pipelines, texts, got, strict=True):
            drawn += pipeline.send([NodeId(i)], [NodeId(i - 1)], [text[i]], [0])
    check_drawn(stages, got, want)


def check_batches_equal_sequential(
    make: MakeStages, vocab: int, seed: int, samplings: Sequence[Sampling], *, length: int = 25
) -> None:
    """The law: a token drawn in a pass that other sessions share is the token drawn alone. Some
    sessions have features, some have not."""
    random, stages = Random(seed), make(2)
    prompts = [random.randint(1, 2 * length) for _ in samplings]
    texts = [[random.randrange(vocab) for _ in range(prompt + length)] for prompt in prompts]
    want = [
        sequential(stages, text, prompt, sampling)
        for text, prompt, sampling in zip(texts, prompts, samplings, strict=True)
    ]
    walks = [
        Walk(text, prompt, vocab, Random(seed + i), features=random.choice([(), (1, 3)]))
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]
    steps = [
        walk.steps(stages, sampling, SessionId(20 + i))
        for i, (walk, sampling) in enumerate(zip(walks, samplings, strict=True))
    ]
    check_drawn(stages, together(stages, steps, random), want)
    for walk in walks:
        assert len(walk.featured) == (len(walk.tokens) if walk.features else 0)


def check_begins_like_another(make: MakeStages, vocab: int, seed: int) -> None:
    """The law: what follows a beginning that was taken over from another session is what follows it
    where it was computed; also from one of which no more than its prompt was kept."""
    random, stages = Random(seed), make(2)
    start = [random.randrange(vocab) for _ in range(random.randint(2, 150))]
    texts = [start + [random.randrange(vocab) for _ in range(20)] for _ in range(3)]
    want = [sequential(stages, text, len(start) + 5) for text in texts]
    first = Pipeline(stages, SessionId(30))
    first.read(texts[0][: len(start)])
    got = []
    for i, text in enumerate(texts):
        later = Pipeline(stages, SessionId(31 + i), like=SessionId(30), shared=len(start))
        later.read(text[: len(start) + 5], len(start))
        got.append(answer_each(later, text, len(start) + 5))
        for stage in stages:
            stage.run(Trim(SessionId(30), len(start)))
    first.close()
    check_drawn(stages, got, want)


def check_begins_as_stored(make: MakeStages, vocab: int, seed: int) -> None:
    """The law: what follows a beginning whose slots were read out, part by part, and put into
    another device of the same engine, is what follows it where it was computed; also of an answer
    that was computed in trees, and of a part of the slots. A session goes on where its slots were
    read out. Nothing of engines whose slots cannot be stored."""
    random, stages = Random(seed), make(2)
    if not all(stage.slot_format for stage in stages):
        return
    start = [random.randrange(vocab) for _ in range(random.randint(2, 150))]
    prompt = random.randint(1, len(start))
    text = start + [random.randrange(vocab) for _ in range(20)]
    want = sequential(stages, text, len(start) + 5)
    walk = Walk(start, prompt, vocab, random, keeps=True)
    alone(stages, walk.steps(stages, session=SessionId(30)))
    edges = sorted({0, random.randint(0, len(start)), random.randint(0, len(start)), len(start)})
    copies = make(2)
    for stage, second in zip(stages, copies, strict=True):
        parts = []
        for first, end in pairwise(edges):
            arrays = cast("Sequence[Any]", stage.run(Export(SessionId(30), first, end)))
            buffers = [memoryview(bytearray(one.tobytes())) for one in arrays]
            parts.append((first, end, buffers))
        stage.run(Release(SessionId(30)))
        restored = second.run(Import(SessionId(40), len(start), parts))
        assert restored == (len(start),)
        second.check()
    shared = random.randint(1, len(start))
    later = Pipeline(copies, SessionId(41), like=SessionId(40), shared=shared)
    later.read(text[: len(start) + 5], shared)
    for second in copies:
        assert second.run(Export(SessionId(41), 0, len(start) + 5))
    check_drawn(copies, answer_each(later, text, len(start) + 5), want)
    for second in copies:
        second.run(Release(SessionId(40)))


def check_continues_an_answer(make: MakeStages, vocab: int, seed: int) -> None:
    """The law: what follows an answer that was computed in trees and taken over from its session,
    all of it or its beginning, is what follows it where it is read as a prompt. With recurrent
    layers the beginning is that whose state is kept."""
    random, stages = Random(seed), make(2)
    start = [random.randrange(vocab) for _ in range(random.randint(40, 100))]
    prompt = random.randint(1, 30)
    beginning = random.randint(1, prompt if stages[0].session_bytes else len(start))
    answer = Walk(start, prompt, vocab, random, keeps=True, kept_state=beginning)
    alone(stages, answer.steps(stages, session=SessionId(30)))
    got, want = [], []
    for i, shared in enumerate((len(start), beginning, beginning)):
        text = start[:shared] + [random.randrange(vocab) for _ in range(20)]
        later = Pipeline(stages, SessionId(31 + i), like=SessionId(30), shared=shared)
        later.read(text[: shared + 5], shared)
        got.append(answer_each(later, text, shared + 5))
        want.append(sequential(stages, text, shared + 5))
    for stage in stages:
        stage.run(Release(SessionId(30)))
    check_drawn(stages, got, want)


def check_prompt_needs_no_verdict(make: MakeStages, vocab: int) -> None:
    """A pass without verified rows gives an empty tuple on the last stage."""
    stages = make(1)
    pipeline = Pipeline(stages)
    assert pipeline.send([NodeId(0)], [NO_PARENT], [1 % vocab], []) == ()


def check_release(make: MakeStages) -> None:
    """Released and unknown sessions may be released again; a released one may be admitted."""
    (stage,) = make(1)
    stage.run(Release(SESSION))
    stage.run(Admit(SESSION, 8, Sampling()))
    stage.run(Release(SESSION))
    stage.run(Release(SESSION))
    stage.run(Admit(SESSION, 8, Sampling()))
    stage.run(Release(SESSION))


def check_wire(make: MakeStages) -> None:
    """What is packed can be unpacked; another type, width or size is a ``ValueError``."""
    first, second = make(2)
    first.run(Admit(SESSION, 8, Sampling()))
    second.run(Admit(SESSION, 8, Sampling()))
    rows = (Row(0, 0, (0,)), Row(1, 1, (0, 1)), Row(2, 2, (0, 1, 2)))
    hidden = first.run(Forward(SESSION, SegmentId(0), 0, rows, tokens=(1, 2, 3)))
    whole = first.pack(TensorRows(hidden, (0, 1, 2)))
    some = first.pack(TensorRows(hidden, (0, 2)))
    assert some.shape[0] == 2
    assert (
        bytes(some.data)
        == bytes(whole.data)[: whole.data.nbytes // 3]
        + bytes(whole.data)[-(whole.data.nbytes // 3) :]
    )
    again = second.pack(TensorRows(second.unpack(whole), (0, 1, 2)))
    assert (again.dtype, again.shape, bytes(again.data)) == (
        whole.dtype,
        whole.shape,
        bytes(whole.data),
    )
    wrong_dtype = type(whole)("int7", whole.shape, whole.data)
    wrong_width = type(whole)(whole.dtype, (whole.shape[0], whole.shape[1] + 1), whole.data)
    wrong_size = type(whole)(whole.dtype, whole.shape, whole.data[:-1])
    for wrong in (wrong_dtype, wrong_width, wrong_size):
        try:
            second.unpack(wrong)
        except ValueError:
            continue
        raise AssertionError(f"rows of {wrong.dtype} {wrong.shape} were unpacked")
    for stage in (first, second):
        stage.run(Release(SESSION))
