"""The disk cache of a stage: kept prompts are stored part by part, and read when they are wanted.

A stage knows no tokens, only names of beginnings (``PrefixKeys``) that the draft node derives from
them. Parts are read out of the cache while no pass runs, and one at a time, so that storing delays
no request by more than a part; of prompts that wait too long the last are dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.core.jobs import Export, Import, Release
from asyncspec.core.kept_states import kept_state
from asyncspec.core.machine import (
    Compute,
    Computed,
    Effects,
    PrefixRead,
    PrefixWritten,
    ReadPrefix,
    SendClosed,
    WritePrefix,
)
from asyncspec_nodes.roles.verify.session import KeptPrompt, StoredPrefixes, VerifyState
from asyncspec_protocol.ids import SessionId, owner
from asyncspec_protocol.limits import PREFIX_UNIT
from asyncspec_protocol.messages import Close

PART = 256
"""Slots of a part at most: some megabytes, which delay a pass by milliseconds. Only a text that has
all tokens of a part can begin with it."""

MAX_WAITING = 8
"""Kept prompts that wait to be stored."""


def store(state: VerifyState, message: Close, prompt_length: int) -> VerifyState:
    """Queue a prompt that was kept, to be stored with its answer."""
    disk = state.stored_prefixes
    if not (message.stored_as and state.config.stores_prefixes):
        return state
    if len(disk.queue) >= MAX_WAITING:
        return _with(state, replace(disk, dropped=disk.dropped + 1))
    border = kept_state(prompt_length, 0) // PREFIX_UNIT * PREFIX_UNIT
    prompt = KeptPrompt(message.session, message.stored_as, border)
    return _with(state, replace(disk, queue=(*disk.queue, prompt)))


def advance(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Go on with the prompt being stored, or begin with the next one."""
    disk = state.stored_prefixes
    while disk.queue and not disk.busy:
        prompt = disk.queue[0]
        name, keys, start = prompt.session, prompt.keys, disk.stored
        end = min(len(keys), state.cached_prompts.get(name, 0) // PREFIX_UNIT) * PREFIX_UNIT
        if disk.stored >= end:
            disk = replace(disk, queue=disk.queue[1:], stored=-1)
        elif disk.stored < 0:
            return _with(state, replace(disk, busy=True)), (WritePrefix(name, keys),)
        elif state.running is None:
            ends = ((start // PART + 1) * PART, prompt.border, end)
            part = Export(name, start, min(at for at in ends if at > start))
            return _with(state, replace(disk, busy=True)), (Compute(part),)
        else:
            break
    return _with(state, disk), ()


def exported(state: VerifyState, computed: Computed, job: Export) -> tuple[VerifyState, Effects]:
    """A part has been read out of the cache."""
    prompt = state.stored_prefixes.queue[0]
    if computed.result == ():
        return _given_up(state), ()
    return state, (WritePrefix(prompt.session, prompt.keys, job.start, job.end, computed.result),)


def written(state: VerifyState, event: PrefixWritten) -> VerifyState:
    """The disk has taken a part, or says how much is there."""
    disk = state.stored_prefixes
    if event.tokens <= disk.stored:
        return _given_up(state)
    return _with(state, replace(disk, stored=event.tokens, busy=False))


def read(state: VerifyState, event: PrefixRead) -> tuple[VerifyState, Effects]:
    """What is on disk of a prompt is here."""
    name, tokens = event.session, event.tokens
    if name not in state.stored_prefixes.restoring:
        return state, ()  # it is not wanted any more
    if not tokens:
        return end_restore(state, name), (_report(name, 0),)
    return state, (Compute(Import(name, tokens, event.parts)),)


def imported(state: VerifyState, computed: Computed, job: Import) -> tuple[VerifyState, Effects]:
    """It is in the cache, as a kept prompt; or it could not be put there."""
    name = job.session
    if name not in state.stored_prefixes.restoring:
        return state, ()  # its release follows
    state = end_restore(state, name)
    if computed.result == ():
        return state, (_report(name, 0),)
    state = replace(state, cached_prompts={**state.cached_prompts, name: job.slots})
    return state, (_report(name, job.slots),)


def begin_restore(
    state: VerifyState, name: SessionId, keys: tuple[bytes, ...]
) -> tuple[VerifyState, Effects]:
    """Read a prompt from disk for a session that has room here."""
    if not (keys and state.config.stores_prefixes):
        return state, (_report(name, 0),)
    disk = state.stored_prefixes
    restoring = {**disk.restoring, name: len(keys) * PREFIX_UNIT}
    return _with(state, replace(disk, restoring=restoring)), (ReadPrefix(name, keys),)


def end_restore(state: VerifyState, *names: SessionId) -> VerifyState:
    """Nothing is read for these sessions any more."""
    disk = state.stored_prefixes
    restoring = {name: slots for name, slots in disk.restoring.items() if name not in names}
    return _with(state, replace(disk, restoring=restoring))


def cancel_restore(state: VerifyState, name: SessionId) -> tuple[VerifyState, Effects]:
    """The draft node does not want it any more."""
    return end_restore(state, name), (Compute(Release(name)), _report(name, 0))


def _given_up(state: VerifyState) -> VerifyState:
    """The prompt being stored is not stored any further."""
    disk = state.stored_prefixes
    left = replace(disk, queue=disk.queue[1:], stored=-1, busy=False, dropped=disk.dropped + 1)
    return _with(state, left)


def _report(name: SessionId, tokens: int) -> SendClosed:
    return SendClosed(owner(name), name, 0, 0, 0, 0.0, kept=tokens > 0, restored=tokens)


def _with(state: VerifyState, disk: StoredPrefixes) -> VerifyState:
    return state if disk is state.stored_prefixes else replace(state, stored_prefixes=disk)
