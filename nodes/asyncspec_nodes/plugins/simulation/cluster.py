"""A cluster of the real machines on the virtual clock, with a model of language for devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from operator import eq

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.errors import AsyncSpecError
from asyncspec.core.machine import Effect, Emit, Finish, Input, Request, Submitted
from asyncspec.core.reference import decode
from asyncspec.core.sampling import Sampling
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec.sim.costs import ClusterCost, CostModel
from asyncspec.sim.language import Language, sequential
from asyncspec.sim.world import Actor, Stalled, World
from asyncspec.trace.recorder import Recorder
from asyncspec.trace.records import NodeRecord, Record, machine_settings
from asyncspec_nodes.plugins.simulation.devices import LanguageSource, PathStage
from asyncspec_nodes.plugins.simulation.shared import SharedWorld
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.tasks import TASKS
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank, first_session
from asyncspec_protocol.links import role_of

TRIED_ROWS = tuple(sorted(PARAMETERS.trial_rows))
"""Rows of the passes that stages have tried, as real ones do when they are loaded."""

MAX_STEPS = 1_000_000_000
"""A bound on liveness only: far more than any run takes."""


class Setting(Struct, frozen=True):
    """One cluster and one load, without a policy."""

    language: Language
    cost: ClusterCost = ClusterCost()
    stages: int = 4
    # New tokens of each request, and tokens of each prompt.
    tokens: int = 256
    prompt_tokens: int = 64
    requests: int = 1
    # When the first requests come; the others come at time 0.
    arrivals: tuple[float, ...] = ()
    # Sampling of the requests in turn; texts are the language's, and only policies read it.
    sampling: tuple[Sampling, ...] = (Sampling(),)
    # Requests that are processed at a time; None: all of them.
    sessions: int | None = None
    # Passes whose segments may wait at a stage.
    window: int = 2
    # Rows of a pass that several sessions share.
    batch_rows: int = 256
    # Prompt nodes per segment.
    prefill_rows: int = 64
    # Rows of a large pass that stages time at their start, as GPUs do; 0: they time none.
    chunk_rows: int = 0


class Outcome(Struct, frozen=True):
    """Result of one policy; texts have been checked, unless the policy is lossy."""

    policy: str
    # By request, as docs/reference/metrics.md defines them.
    stats: tuple[dict[str, float], ...]
    # Virtual time until the last request had ended, and each device's share of it, by rank.
    seconds: float
    busy: tuple[float, ...]
    # Steps of all machines.
    steps: int
    # The policy may take other tokens than the target's, so there is nothing to compare with.
    lossy: bool = False
    # Lines of a trace, if recorded.
    trace: tuple[Record, ...] = ()
    # When the user got each token, by request, in virtual time.
    times: tuple[tuple[float, ...], ...] = ()


class WrongText(AsyncSpecError):
    """A simulated run did not produce the target's text, or did not end: a bug."""


def simulate(
    setting: Setting,
    policy: str,
    *,
    policies: Mapping[str, Policy] = POLICIES,
    record: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Outcome:
    """Run all requests of a setting to their end under one policy. ``progress`` is called with the
    new tokens so far, over all requests. Raises ``WrongText``."""
    world, recorders = _world(setting, policies, record=record)
    requests = [_request(setting, number, policy) for number in range(setting.requests)]
    times: dict[int, list[float]] = {request.request: [] for request in requests}
    seconds = 0.0

    def watch(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        nonlocal seconds
        for effect in effects:
            if isinstance(effect, Finish):
                seconds = world.now
            elif isinstance(effect, Emit):
                times[effect.request] += [world.now] * len(effect.tokens)
                progress(sum(map(len, times.values())))

    world.watch = watch
    for request, at in zip(requests, setting.arrivals, strict=False):
        world.at(at, world.feed, DRAFT, Submitted(request))
    for request in requests[len(setting.arrivals) :]:
        world.feed(DRAFT, Submitted(request))
    try:
        world.run(most_steps=MAX_STEPS)
    except Stalled as error:
        raise WrongText(f"policy {policy}: {error}") from None
    lossy = bool(policies[policy].top_logprobs)
    for request in requests:
        text = tuple(world.tokens.get(request.request, ()))
        # A lossy policy's text is only as long as the reference's.
        if not (lossy and len(text) == request.max_new_tokens):
            check_text(setting.language, request, text)
    lines = ((one.node, *one.read(0, one.end)[0], one.ended()) for one in recorders.values())
    return Outcome(
        policy=policy,
        stats=tuple(world.finished[request.request].stats for request in requests),
        seconds=seconds,
        busy=tuple(_busy(actor, seconds) for actor in world.actors.values()),
        steps=world.steps,
        lossy=lossy,
        trace=tuple(chain.from_iterable(lines)),
        times=tuple(tuple(times[request.request]) for request in requests),
    )


def _request(setting: Setting, number: int, policy: str) -> Request:
    language = setting.language
    longest = language.longest(number)
    return Request(
        request=number,
        prompt=language.prompt(number, setting.prompt_tokens),
        max_new_tokens=setting.tokens if longest is None else min(setting.tokens, longest),
        sampling=setting.sampling[number % len(setting.sampling)],
        stop_tokens=frozenset(),
        policy=policy,
    )


def _world(
    setting: Setting, policies: Mapping[str, Policy], *, record: bool
) -> tuple[World, dict[Rank, Recorder]]:
    """Machines, devices and links, ready."""
    actors = {DRAFT: draft_actor(setting, policies)}
    stages = [Rank(rank) for rank in range(1, setting.stages + 1)]
    for rank in stages:
        actors[rank] = stage_actor(setting, rank, tried=True)
    pricing = CostModel(setting.cost)
    recorders: dict[Rank, Recorder] = {}
    if processors := setting.cost.processors:
        world: World = SharedWorld(
            actors, pricing, recorders, pricing, tasks=TASKS, processors=processors
        )
    else:
        world = World(actors, pricing, recorders, pricing, tasks=TASKS)
    if record:
        for rank, actor in actors.items():
            recorders[rank] = recorder(world, rank, actor, setting.stages)
    connect(world, setting.stages)
    return world, recorders


def draft_actor(
    setting: Setting, policies: Mapping[str, Policy] = POLICIES, rank: Rank = DRAFT
) -> Actor:
    """A fresh draft node, whose source guesses the setting's language."""
    config = DraftConfig(
        stages=setting.stages,
        processors=setting.cost.processors,
        policies=policies,
        prefill_rows=setting.prefill_rows,
        max_sessions=setting.sessions or setting.requests,
        batch_rows=setting.batch_rows,
        # Links and statistics may take as long as the slowest link makes them.
        rejoin_seconds=1e9,
        stats_seconds=1e9,
        first_session=first_session(rank),
    )
    machine = DraftMachine(config)
    return Actor(machine, machine.initial(), LanguageSource(setting.language).run)


def stage_actor(setting: Setting, rank: Rank, *, tried: bool = False) -> Actor:
    """A fresh stage. ``tried``: with passes tried when it was loaded, as a real one."""
    config = VerifyConfig(
        rank=rank, stages=setting.stages, window=setting.window, batch_rows=setting.batch_rows
    )
    if tried or setting.chunk_rows:
        config = with_trial(config, setting.cost, setting.chunk_rows)
    machine = VerifyMachine(config)
    device = PathStage(setting.language, last=rank == setting.stages)
    return Actor(machine, machine.initial(), device.run)


def with_trial(config: VerifyConfig, cost: ClusterCost, chunk_rows: int = 0) -> VerifyConfig:
    """A stage's settings with the passes that it would have tried, at their prices."""
    sizes = (*TRIED_ROWS, chunk_rows) if chunk_rows > TRIED_ROWS[-1] else TRIED_ROWS
    seconds = [cost.pass_seconds(config.rank, rows) for rows in sizes]
    microseconds = tuple([int(1e6 * one) for one in seconds])
    return replace(config, tried_rows=sizes, tried_microseconds=microseconds)


def recorder(world: World, rank: Rank, actor: Actor, stages: int) -> Recorder:
    """Records a simulated node's events without bound."""
    role = role_of(rank, stages)
    config = machine_settings(actor.machine.config)  # type: ignore[attr-defined]
    node = NodeRecord(rank, world.now, world.now, role, stages, config=config, whole=True)
    return Recorder(node, max_lines=MAX_STEPS, clock=lambda: world.now)


def connect(world: World, stages: int, drafts: Iterable[Rank] = (DRAFT,)) -> None:
    """Bring up every link that is down."""
    for draft in drafts:
        for rank in range(1, stages + 1):
            world.connect(draft, Rank(rank))
    for rank in range(1, stages):
        world.connect(Rank(rank), Rank(rank + 1))


def check_text(language: Language, request: Request, text: Sequence[int]) -> None:
    """Raise ``WrongText`` where an answer is not the sequential reference decoder's."""
    expected = decode(sequential(language), request.prompt, request.max_new_tokens)
    if tuple(text) != expected:
        same = sum(takewhile(bool, map(eq, text, expected)))
        raise WrongText(
            f"policy {request.policy}, request {request.request}: the text differs from the "
            f"sequential decoder's at token {same}; this is a bug in asyncspec"
        )


def _busy(actor: Actor, until: float) -> float:
    """Busy share of the time; excludes a draft that runs past the end."""
    over = max(0.0, actor.busy_until - until)
    return (actor.busy_seconds - over) / until if until else 0.0
