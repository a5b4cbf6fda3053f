"""The disk cache of a stage: prompts are stored part by part, and read when they are wanted.

A stage knows no tokens, only names of beginnings (``PrefixKeys``) that the draft node derives from
them. A prompt is stored once it is read, so that it outlives a kill in the middle of its answer; an
answer, when it is kept. Parts are read out of the cache while no pass runs, and one at a time,
so that storing delays no request by more than a part; of prompts that wait too long the last are
dropped.
"""

from __future__ import annotations

from collections.abc import Collection

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
from asyncspec.core.prefix_keys import PART
from asyncspec_nodes.roles.verify.session import StoredPrefixes, StoredText, VerifyState
from asyncspec_protocol.ids import SessionId, owner
from asyncspec_protocol.limits import PREFIX_UNIT

MAX_WAITING = 32
"""Prompts that wait to be stored: their names, as their slots are in the cache all the same."""


def store(
    state: VerifyState, name: SessionId, keys: tuple[bytes, ...], prompt_length: int
) -> VerifyState:
    """Queue a session's prompt, which may still have to be read, or what is kept of the session.
    ``keys``: none where it is not to be stored."""
    disk = state.stored_prefixes
    if not (keys and state.config.stores_prefixes):
        return state
    waiting = disk.queue.get(name)
    if waiting is None and len(disk.queue) >= MAX_WAITING:
        return _with(state, replace(disk, dropped=disk.dropped + 1))
    border = kept_state(prompt_length, 0) // PREFIX_UNIT * PREFIX_UNIT
    text = StoredText(keys, border, -1 if waiting is None else waiting.stored)
    return _with(state, replace(disk, queue={**disk.queue, name: text}))


def advance(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Go on with the first text of which something can be stored now."""
    disk = state.stored_prefixes
    if disk.busy is not None:
        return state, ()
    done: set[SessionId] = set()
    effects: Effects = ()
    for name, text in disk.queue.items():
        end, grows = _storable(state, name, text)
        if end <= max(0, text.stored):
            if not grows:
                done.add(name)
        elif text.stored < 0:
            effects = (WritePrefix(name, text.keys),)
        elif state.running is None:
            ends = ((text.stored // PART + 1) * PART, text.border, end)
            part = Export(name, text.stored, min(at for at in ends if at > text.stored))
            effects = (Compute(part),)
        if effects:
            disk = replace(disk, busy=name)
            break
    return _with(state, _without(disk, done)), effects


def _storable(state: VerifyState, name: SessionId, text: StoredText) -> tuple[int, bool]:
    """How many first tokens of a text can be stored, and whether they get more. A prompt can be
    once it is read, up to the border behind which its next turn may differ."""
    if (session := state.sessions.get(name)) is not None:
        is_read = session.slots.committed >= text.border
        return text.border if is_read else 0, not is_read
    kept = state.cached_prompts.get(name, 0)
    return min(len(text.keys), kept // PREFIX_UNIT) * PREFIX_UNIT, False


def exported(state: VerifyState, computed: Computed, job: Export) -> tuple[VerifyState, Effects]:
    """A part has been read out of the cache."""
    text = state.stored_prefixes.queue.get(job.session)
    if text is None or computed.result == ():
        return _given_up(state, job.session), ()
    return state, (WritePrefix(job.session, text.keys, job.start, job.end, computed.result),)


def written(state: VerifyState, event: PrefixWritten) -> VerifyState:
    """The disk has taken a part, or says how much is there."""
    disk, name = state.stored_prefixes, event.session
    text = disk.queue.get(name)
    if text is None or event.tokens <= text.stored:
        return _given_up(state, name)
    queue = {**disk.queue, name: replace(text, stored=event.tokens)}
    return _with(state, replace(disk, queue=queue, busy=None))


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


def _given_up(state: VerifyState, name: SessionId) -> VerifyState:
    """The text being stored is not stored any further."""
    disk = state.stored_prefixes
    return _with(state, _without(replace(disk, busy=None, dropped=disk.dropped + 1), {name}))


def _without(disk: StoredPrefixes, names: Collection[SessionId]) -> StoredPrefixes:
    if not names:
        return disk
    left = {name: text for name, text in disk.queue.items() if name not in names}
    return replace(disk, queue=left)


def _report(name: SessionId, tokens: int) -> SendClosed:
    return SendClosed(owner(name), name, 0, 0, 0, 0.0, kept=tokens > 0, restored=tokens)


def _with(state: VerifyState, disk: StoredPrefixes) -> VerifyState:
    return state if disk is state.stored_prefixes else replace(state, stored_prefixes=disk)
