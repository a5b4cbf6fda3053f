"""Which machine holds which layers: placed once enough machines have joined, and again where one
has left for good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from asyncspec.core.errors import ClusterError, UserError
from asyncspec.placement.model import FREE, Constraints, TargetCost, span_text
from asyncspec_nodes.cluster.placement import why_not
from asyncspec_nodes.plugins.join.assignment import Assignment
from asyncspec_nodes.plugins.join.members import Members
from asyncspec_nodes.plugins.join.messages import Dropped


class FormationOptions(Struct, frozen=True, kw_only=True):
    """When machines are enough, and what they are to be."""

    # Machines to wait for, the first one included where it holds a stage; None: until the target
    # fits and no machine has joined for ``settle_seconds``.
    machines: int | None = None
    stages: int | None = None
    settle_seconds: float = 10.0
    wait_seconds: float = 600.0
    # A user may press Enter: ``Formation.pressed``.
    asks: bool = False
    # Spares prepare for the loss of another machine.
    warm: bool = False


WORTH = 1.2
"""Times as many tokens a second that an idle cluster is planned anew for: all stages load again."""


class Formation:
    """Gives layers to members. ``rejoin_seconds``: what requests wait for lost layers; ``say``
    receives a line for each event."""

    def __init__(
        self,
        members: Members,
        target: TargetCost,
        options: FormationOptions,
        rejoin_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        # When the last machine joined.
        self.joined_at = time.monotonic()
        self._members = members
        self._target = target
        self._options = options
        self._rejoin_seconds = rejoin_seconds
        self._say = say
        # When no machine could take over a lost stage: the last one to join then.
        self._said_at: float | None = None
        # Machines of an earlier run: once they are here nobody else is waited for.
        self.expected = 0
        # What a user has pressed Enter for.
        self._held = self._started = False
        # The members that the wait was said for.
        self._waits_for: frozenset[str] = frozenset()
        # The members' states and the assignment that stages were prepared for.
        self._prepared_for: object = None
        # The members and their speeds that the best plan was looked for.
        self._planned_for: frozenset[tuple[str, float]] = frozenset()

    def pressed(self) -> None:
        """A user wants it to wait for further machines; the next time, to start."""
        if self._members.assignment:
            return
        self._started, self._held = self._held, not self._held
        if self._held:
            self._say("waits for further machines; Enter starts with those that are here")
        self.joined_at = time.monotonic()

    async def place(self, change: Callable[[float], Awaitable[None]]) -> None:
        """Wait for machines, and place the layers. ``change`` waits for a change of the members,
        at most so many seconds. Raises ``UserError``, and ``ClusterError`` where machines do not
        come."""
        options, members = self._options, self._members
        give_up = time.monotonic() + options.wait_seconds
        said = False
        while True:
            await change(1.0)
            self._forget_lost()
            count = len(members.by_id)
            if not self._are_enough(count):
                self._say_wait()
            else:
                speeds = members.speeds
                assignment = await asyncio.to_thread(members.form())
                if assignment is not None:
                    if self._are_here(assignment):
                        break
                    continue
                text = why_not(self._target, members.devices, Constraints(options.stages))
                if options.machines and count >= options.machines:
                    raise UserError(text)
                if not said:
                    self._say(f"{text}; waiting for further machines")
                    said = True
            if time.monotonic() > give_up:
                wanted = f" of {options.machines}" if options.machines else ""
                raise ClusterError(
                    f"{count}{wanted} machines have joined within {options.wait_seconds:g} s; run "
                    "the join command on the others, or give --machines"
                )
        self._planned_for = speeds
        self.carry_out(assignment)

    def pending(self) -> str:
        """The machines that it waits for."""
        there, options = len(self._members.by_id), self._options
        more = f"{there}{f' of {options.machines}' if options.machines else ''} here"
        if there and not (options.machines or self._held):
            left = self.joined_at + self._settle_seconds - time.monotonic()
            more += f", {max(0.0, left):.0f} s more"
        return f"machines to join ({more})"

    @property
    def _settle_seconds(self) -> float:
        """Half of ``wait_seconds`` at most: who is here by its end is enough."""
        return min(self._options.settle_seconds, self._options.wait_seconds / 2)

    def _are_enough(self, count: int) -> bool:
        options = self._options
        if self._held or not count:
            return False
        if self._started:
            return True
        if options.machines:
            return count >= options.machines
        settled = time.monotonic() - self.joined_at > self._settle_seconds
        return settled or 0 < self.expected <= count

    def _say_wait(self) -> None:
        """Until when it waits, once for those who are here."""
        here, options = frozenset(self._members.by_id), self._options
        if not here or here == self._waits_for or self._held:
            return
        self._waits_for = here
        enter = ", or Enter" if options.asks else ""
        if options.machines:
            enter = "; Enter starts with these" if options.asks else ""
            self._say(f"{len(here)} of {options.machines} machines are here{enter}")
            return
        who = "alone" if len(here) == 1 else f"with {len(here)} machines"
        more = f"; --machines {max(3, len(here) + 1)}{enter} to wait"
        if self.expected > len(here):
            more = f", or once the {self.expected} of its last run are here{more}"
        self._say(f"starts {who} in {self._settle_seconds:g} s{more}")

    @property
    def may_improve(self) -> bool:
        """Whether the members are others, or faster, than those that the plan was made for."""
        return self._members.ready and self._members.speeds != self._planned_for

    async def improve(self) -> Assignment | None:
        """A plan for all who are here that promises more than the present one, which is said; None
        where there is none, which spares are told."""
        members = self._members
        if not all(member.presence.state == "here" for member in members.by_id.values()):
            return None
        speeds = members.speeds
        fresh = await asyncio.to_thread(members.form())
        if fresh is None or not self._are_here(fresh) or not members.ready:
            return None
        self._planned_for = speeds
        then, now = members.predicted(fresh), members.predicted(members.assignment)
        times = members.rate(fresh) / members.rate(members.assignment)
        if times < WORTH:
            why = (
                f"{then}, as planned now {now} ({self._sessions}); layers move for {WORTH:g} times "
                "as many"
                if times > 1.0
                else f"no plan with it promises more than now: {now} ({self._sessions})"
            )
            members.explain_spares(why)
            self._say_spares()
            return None
        self._say(
            f"plans anew, as nobody asks now: {then}, as planned now {now} ({self._sessions})"
        )
        return fresh

    @property
    def _sessions(self) -> str:
        return f"{self._members.sessions} answers at a time, without speculation"

    def carry_out(self, assignment: Assignment) -> None:
        """Make the best plan for those who are here the present one."""
        self._assign(assignment, "no plan with it promises more")

    async def repair(self) -> bool:
        """Give the stages of those who have left for good to others; whether that was done."""
        self._forget_lost()
        members = self._members
        await self._prepare()
        incomplete = members.incomplete
        search = members.repaired() if incomplete else members.relieved()
        if search is None:
            return False
        assignment = await asyncio.to_thread(search)
        if assignment is not None and self._are_here(assignment):
            self._said_at = None
            self._assign(assignment)
            return True
        if assignment is None and incomplete and self.joined_at != self._said_at:
            self._said_at = self.joined_at
            self._say(
                f"{why_not(self._target, members.devices, FREE)}; join another "
                f"machine: requests wait for {self._rejoin_seconds:g} s"
            )
        return False

    async def _prepare(self) -> None:
        """Have the stages of suspected machines loaded where they would go: when one is gone that
        is under way, and when it is heard again it is undone. Warm spares load one before."""
        members = self._members
        states = tuple(
            sorted((name, member.presence.state) for name, member in members.by_id.items())
        )
        seen = states, members.assignment, members.ready
        if not members.assignment or members.incomplete or seen == self._prepared_for:
            return
        self._prepared_for = seen
        standby = await asyncio.to_thread(members.standby())
        if members.assignment == seen[1]:
            members.stand_by(standby)

    def _are_here(self, assignment: Assignment) -> bool:
        """False where somebody has left during the search: then it is made again."""
        return all(one.member in self._members.by_id for one in assignment)

    def _assign(self, assignment: Assignment, why: str = "") -> None:
        """``why`` machines may be left over."""
        members = self._members
        members.assign(assignment, why)
        for rank, one in enumerate(members.assignment, start=1):
            if rank not in members.serving:
                name = members.name(one.member)
                self._say(f"stage {rank}: {span_text(one.layers)} on {name}")
        self._say_spares()

    def _say_spares(self) -> None:
        members = self._members
        names = ", ".join(members.name(spare.offer.member) for spare in members.spares)
        if names:
            self._say(f"spare: {names}{f': {members.why_spare}' if members.why_spare else ''}")

    def _forget_lost(self) -> None:
        """Those who are gone have left: they stop by themselves, or join anew."""
        for name, member in list(self._members.by_id.items()):
            presence = member.presence
            if presence.state == "gone":
                why = "its process has ended"
                if not presence.has_ended:
                    why = f"silent for {presence.silent_seconds:g} s"
                self._say(f"{self._members.name(name)} is gone: {why}")
                member.send(Dropped())
                del self._members.by_id[name]


async def answer_before(event: asyncio.Event, question: Awaitable[bool]) -> bool:
    """An answer; False where the event comes first, as who is asked may be gone."""
    answer = asyncio.ensure_future(question)
    tasks = answer, asyncio.create_task(event.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return answer.done() and answer.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
