"""Losses and restarts: what is given once, what is over everywhere, whose a session is."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

RECOVERY: tuple[Mutant, ...] = (
    Mutant(
        "floor-not-sent",
        "return state, (*floors, Arm(REJOIN, None))",
        "return state, (Arm(REJOIN, None),)",
        "test_every_stage_gets_a_floor_when_the_pipeline_is_complete_again",
    ),
    Mutant(
        "floor-keeps-one-session",
        "over = tuple(s for s in held if s < first and owner(s) == draft)",
        "over = tuple(s for s in held if s < first - 1 and owner(s) == draft)",
        "test_a_floor_ends_the_sessions_below_it_and_no_other",
    ),
    Mutant(
        "floor-forgets-one-close",
        "closed_early=frozenset(s for s in known.closed_early if s >= first),",
        "closed_early=frozenset(s for s in known.closed_early if s > first),",
        "test_a_floor_ends_the_sessions_below_it_and_no_other",
    ),
    Mutant(
        "floor-lets-one-session-begin",
        "opened=max(known.opened, SessionId(first - 1)),",
        "opened=max(known.opened, SessionId(first - 2)),",
        "test_a_floor_ends_the_sessions_below_it_and_no_other",
    ),
    Mutant(
        "floor-ends-one-session-too-many-at-source",
        "over = tuple(session for session in _of(state, peer) if session < first)",
        "over = tuple(session for session in _of(state, peer) if session <= first)",
        "test_a_source_forgets_the_sessions_below_a_floor_and_no_other",
    ),
    Mutant(
        "restart-gives-token-again",
        "return Job(session.request, counters, session.given)",
        "return Job(session.request, counters, session.given[:-1])",
        "test_a_restarted_job_goes_on_behind_the_last_token_that_was_given",
    ),
    Mutant(
        "owner-not-checked",
        "if is_draft(peer) and owner(session) != peer:",
        "if not is_draft(peer) and owner(session) != peer:",
        "test_a_stage_hears_of_a_session_from_its_own_draft_node_only",
    ),
    Mutant(
        "lost-session-stays-queued",
        "queue=tuple([w for w in state.queue if w.session not in over]),",
        "queue=state.queue,",
        "test_rows_of_a_session_that_is_over_leave_the_queue",
    ),
    Mutant(
        "lost-session-stays-parked",
        "parked=tuple([w for w in state.parked if w.session not in over]),",
        "parked=state.parked,",
        "test_rows_of_a_session_that_is_over_are_not_sent_on",
    ),
    Mutant(
        "lost-draft-node-takes-all",
        "over = frozenset(s for s in everything if not is_draft(peer) or owner(s) == peer)",
        "over = frozenset(everything)",
        "test_losing_one_ends_its_sessions_alone",
    ),
)
