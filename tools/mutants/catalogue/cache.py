"""Cache slots: who sits where, what a row sees, what is shared, and how many slots there are."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

CACHE: tuple[Mutant, ...] = (
    Mutant(
        "slot-reused",
        "slots.seats.copy(), slots.used",
        "slots.seats.copy(), slots.used - bool(slots.seats)",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-ancestor-hidden",
        "line = line[bisect_left(line, start) :]",
        "line = line[bisect_left(line, start) + 1 :]",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-position-too-deep",
        "rows.append(Row(slot, start + len(line) - 1, line))",
        "rows.append(Row(slot, start + len(line), line))",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-ancestors-not-moved",
        "seats = {n: Seat(s.parent) if s.line else s for n, s in",
        "seats = {n: s for n, s in",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-any-parent",
        "elif parent == tip:",
        "elif parent is not None:",
        "test_place_refuses_what_hangs_from_nothing_and_what_is_there",
    ),
    Mutant(
        "slot-node-twice",
        "if start + len(seats) != slot:",
        "if start + len(seats) > slot:",
        "test_place_refuses_what_hangs_from_nothing_and_what_is_there",
    ),
    Mutant(
        "slot-frontier-not-moved",
        "return _commit(Slots(slots.committed, slots.tip, seats), committed), stay",
        "return Slots(slots.committed, slots.tip, seats), stay",
        "test_fig_3_accepted_and_retained_indices",
    ),
    Mutant(
        "slot-compacted-from-0",
        "stay = tuple(compress(count(slots.committed), stays))",
        "stay = tuple(compress(count(), stays))",
        "test_fig_3_accepted_and_retained_indices",
    ),
    Mutant(
        "slot-compacted-behind-new-frontier",
        "start=session.slots.committed, keep=stay)",
        "start=slots.committed, keep=stay)",
        "test_trap_non_contiguous_accepted_path_is_compacted_on_every_stage",
    ),
    Mutant(
        "slot-last-prompt-row-not-judged",
        "if row.position >= prompt_length - 1)",
        "if row.position >= prompt_length)",
        "test_a_segment_becomes_a_pass_and_a_verdict",
    ),
)
