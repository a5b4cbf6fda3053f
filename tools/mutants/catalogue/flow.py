"""Flow: credit, queues, and the order of control and data."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

FLOW: tuple[Mutant, ...] = (
    Mutant(
        "credit-one-too-many-taken",
        "if credit is None or credit.received >= credit.granted:",
        "if credit is None or credit.received > credit.granted:",
        "test_a_segment_needs_credit",
    ),
    Mutant(
        "credit-one-too-many-announced",
        "if message.batch_remaining > credit.granted - received:",
        "if message.batch_remaining > credit.granted - received + 1:",
        "test_more_cannot_be_announced_than_may_be_sent",
    ),
    Mutant(
        "credit-after-a-lack-only-noted",
        "return state.sent < state.allowed and not idle",
        "return not idle",
        "test_credit_sends_what_waits_for_it_and_else_is_only_noted",
    ),
    Mutant(
        "credit-of-an-idle-stage-only-noted",
        "return state.sent < state.allowed and not idle",
        "return state.sent < state.allowed",
        "test_credit_shows_a_policy_that_waits_for_it_that_the_first_stage_is_idle",
    ),
    Mutant(
        "credit-for-what-is-queued",
        "limit = credit.received - queued(state, peer) + places + credit.extra",
        "limit = credit.received + places + credit.extra",
        "test_each_has_credit_of_its_own",
    ),
    Mutant(
        "credit-taken-back-by-stage",
        "if limit > credit.granted:",
        "if limit != credit.granted:",
        "test_credit_that_was_given_for_a_session_outlives_it",
    ),
    Mutant(
        "credit-taken-back-unnoticed-by-draft-node",
        "if limit < state.allowed:",
        "if limit < state.sent:",
        "test_credit_is_never_taken_back",
    ),
    Mutant(
        "credit-taken-back-unnoticed-by-stage",
        "if message.limit < state.allowed:",
        "if message.limit < state.sent:",
        "test_messages_that_a_peer_must_not_send",
    ),
    Mutant(
        "credit-overdrawn-by-draft-node",
        "while state.sent < state.allowed and idle < len(state.sessions):",
        "while state.sent <= state.allowed and idle < len(state.sessions):",
        "test_no_segment_is_sent_without_credit",
    ),
    Mutant(
        "credit-overdrawn-by-stage",
        "ready = state.outbox[: max(0, state.allowed - state.sent)]",
        "ready = state.outbox[: 1 + max(0, state.allowed - state.sent)]",
        "test_without_credit_a_result_is_parked_and_nothing_is_started",
    ),
    Mutant(
        "credit-not-waited-for",
        "return onward > max(0, state.allowed - state.sent)",
        "return onward > 1 + max(0, state.allowed - state.sent)",
        "test_no_pass_is_announced_without_credit_for_the_one_in_service",
    ),
    Mutant(
        "credit-of-old-link-kept-by-draft-node",
        "state = replace(state, allowed=0, sent=0, window=0)",
        "state = replace(state, window=0)",
        "test_credit_starts_anew_with_a_link",
    ),
    Mutant(
        "credit-of-old-link-kept-by-stage",
        "state = replace(state, allowed=0, sent=0)\n",
        "state = replace(state, allowed=state.allowed - state.sent, sent=0)\n",
        "test_credit_starts_anew_with_a_link",
    ),
    Mutant(
        "order-queue-reversed",
        "queue=(*state.queue, live)",
        "queue=(live, *state.queue)",
        "test_segments_of_a_link_wait_in_the_order_in_which_they_came",
    ),
    Mutant(
        "order-pass-before-compaction",
        "state, more = schedule(state, now)\n        return state, effects + more",
        "state, more = schedule(state, now)\n        return state, more + effects",
        "test_a_prune_that_lets_a_pass_begin_compacts_first",
    ),
    Mutant(
        "order-new-session-before-close",
        "state, more = schedule(state, now)\n        return state, (*effects, *more)",
        "state, more = schedule(state, now)\n        return state, (*more, *effects)",
        "test_a_close_goes_before_what_takes_its_place",
    ),
    Mutant(
        "order-segment-before-open",
        "effects.extend(sent)",
        "effects[:0] = sent",
        "test_a_session_is_opened_before_its_first_segment",
    ),
    Mutant(
        "order-prune-told-first-stage-only",
        "prunes = tuple(Send(rank, accepted.prune) for rank in state.linked_stages)",
        "prunes = tuple(Send(rank, accepted.prune) for rank in state.linked_stages[:1])",
        "test_every_stage_hears_of_every_prune_and_every_end",
    ),
    Mutant(
        "order-unsent-nodes-not-kept",
        "keep=tuple([n for n in session.tree.nodes if n != root]),",
        "keep=tuple([n for n in session.sent if n != root]),",
        "test_what_waits_for_credit_is_kept_by_a_prune",
    ),
    Mutant(
        "order-dead-nodes-verified",
        "alive = {n: o for n, o in _target_outputs(session, verdict) if n in session.sent}",
        "alive = dict(_target_outputs(session, verdict))",
        "test_only_live_nodes_are_judged_and_counted_as_sent",
    ),
    Mutant(
        "order-verified-nodes-kept",
        "verified={n: t for n, t in session.verified.items() if n in tree},",
        "verified=session.verified,",
        "test_only_live_nodes_are_judged_and_counted_as_sent",
    ),
    Mutant(
        "order-child-before-parent",
        "attached = node not in here and (parent in here or parent in held)",
        "attached = node not in here",
        "test_a_later_stage_ends_an_orphan_session_and_keeps_the_link",
    ),
    Mutant(
        "order-waiting-node-twice",
        "attached = node not in here and (parent in here or parent in held)",
        "attached = parent in here or parent in held",
        "test_a_node_that_waits_is_not_sent_again",
    ),
    Mutant(
        "order-computed-node-twice",
        "unseen = held.keys().isdisjoint(segment.ids)",
        "unseen = True",
        "test_a_node_is_not_sent_twice",
    ),
    Mutant(
        "order-session-beyond-the-last-at-stage",
        "if session > marks.opened and session not in marks.closed_early:",
        "if session > marks.opened + 1 and session not in marks.closed_early:",
        "test_a_stage_knows_no_session_beyond_the_last_that_was_opened",
    ),
    Mutant(
        "order-session-beyond-the-last-at-draft-node",
        "if session is None and message.session >= state.next_session:",
        "if session is None and message.session > state.next_session:",
        "test_a_draft_node_knows_no_session_beyond_the_last_that_it_opened",
    ),
    Mutant(
        "order-session-opened-twice",
        "if name <= marks.opened and not early:",
        "if name < marks.opened and not early:",
        "test_a_session_is_opened_once",
    ),
    Mutant(
        "order-verdict-from-any-stage",
        "case Verdict() if peer == state.config.stages:",
        "case Verdict() if peer <= state.config.stages:",
        "test_a_verdict_comes_from_the_last_stage_and_credit_from_the_first",
    ),
    Mutant(
        "order-credit-from-any-stage",
        "case Credit(limit, room) if peer == FIRST:",
        "case Credit(limit, room) if peer >= FIRST:",
        "test_a_verdict_comes_from_the_last_stage_and_credit_from_the_first",
    ),
    Mutant(
        "order-account-of-another-stage",
        "case Closed() if peer == message.rank:",
        "case Closed() if peer >= message.rank:",
        "test_a_stage_speaks_for_itself_alone",
    ),
    Mutant(
        "pass-waits-longer-than-it-takes",
        "if worth > best and absent.latest - since < alone:",
        "if worth > best:",
        "test_a_wait_ends_with_a_return_within_a_pass",
    ),
    Mutant(
        "pass-waits-on-after-an-early-timer",
        "if waiting is not None and waiting.over:",
        "if waiting is not None and waiting.until < start:",
        "test_one_that_does_not_come_costs_one_bounded_wait",
    ),
    Mutant(
        "order-readiness-of-another-stage",
        "case Ready(rank) if peer == rank:",
        "case Ready(rank) if peer >= rank:",
        "test_a_stage_speaks_for_itself_alone",
    ),
)
