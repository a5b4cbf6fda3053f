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
    Mutant(
        "restart-forgets-what-was-given",
        "prefix = request.prompt + given\n",
        "prefix = request.prompt\n",
        "test_a_restarted_job_goes_on_behind_the_last_token_that_was_given",
    ),
    Mutant(
        "restart-behind-those-that-wait",
        "state = replace(state, backlog=(*back, *state.backlog))",
        "state = replace(state, backlog=(*state.backlog, *back))",
        "test_requests_of_a_broken_pipeline_go_before_those_that_wait",
    ),
    Mutant(
        "restart-session-id-used-again",
        "first = SessionId(opened + 1)",
        "first = SessionId(opened)",
        "test_sessions_go_on_above_those_that_a_stage_has_heard_of",
    ),
    Mutant(
        "restart-session-id-not-moved",
        "state = replace(state, next_session=SessionId(state.next_session + 1))",
        "state = replace(state, next_session=SessionId(state.next_session))",
        "test_a_restarted_job_goes_on_behind_the_last_token_that_was_given",
    ),
    Mutant(
        "restart-before-links-stand",
        "return drafts and stages <= self.peers and stages <= self.ready",
        "return drafts and stages <= self.peers",
        "test_nothing_is_opened_while_a_stage_has_no_link_to_the_next",
    ),
    Mutant(
        "restart-before-all-stages-are-there",
        "return drafts and stages <= self.peers and stages <= self.ready",
        "return drafts and bool(stages & self.peers) and stages & self.peers <= self.ready",
        "test_every_stage_gets_a_floor_when_the_pipeline_is_complete_again",
    ),
    Mutant(
        "restart-readiness-outlives-link",
        "ready=state.ready - {peer},\n        echoes",
        "ready=state.ready,\n        echoes",
        "test_every_stage_gets_a_floor_when_the_pipeline_is_complete_again",
    ),
    Mutant(
        "restart-waits-for-ever",
        "effects.append(Arm(REJOIN, now + state.config.rejoin_seconds))",
        "effects.append(Arm(REJOIN, None))",
        "test_a_pipeline_that_never_comes_back_fails_the_request_in_bounded_time",
    ),
    Mutant(
        "restart-never-given-up",
        "blamed = silent == [session] and breaks >= state.config.most_breaks",
        "blamed = silent == [session] and breaks > 9 * state.config.most_breaks",
        "test_it_ends_where_it_is_alone",
    ),
    Mutant(
        "restart-blames-the-innocent",
        "breaks = times + (0 if session.committed else counters.breaks)",
        "breaks = times + counters.breaks",
        "test_breaks_are_counted_from_the_last_token_on",
    ),
    Mutant(
        "end-without-accounts",
        "if ending.missing and not force:",
        "if len(ending.missing) > 1 and not force:",
        "test_a_request_ends_once_all_stages_have_given_account",
    ),
    Mutant(
        "end-waits-for-lost-stage",
        "left = replace(ending, missing=ending.missing - {peer})",
        "left = replace(ending, missing=ending.missing)",
        "test_a_lost_stage_owes_no_account",
    ),
    Mutant(
        "end-told-first-stage-only",
        "closes = tuple(Send(rank, message) for rank in sorted(state.peers))",
        "closes = tuple(Send(rank, message) for rank in sorted(state.peers)[:1])",
        "test_every_stage_hears_of_every_prune_and_every_end",
    ),
    Mutant(
        "end-overtaken-by-begin",
        "early = known.closed_early | {session_id}",
        "early = known.closed_early",
        "test_close_may_overtake_open",
    ),
    Mutant(
        "end-of-running-pass-forgotten",
        "if running is not None and running.of(session_id):",
        "if running is not None and not running.of(session_id):",
        "test_close_frees_everything_and_gives_account",
    ),
    Mutant(
        "lost-kept-prompts-stay",
        "everything = state.sessions.keys() | state.closing.keys() | state.kept.keys()",
        "everything = state.sessions.keys() | state.closing.keys()",
        "test_prompts_are_kept_while_their_draft_node_is_there",
    ),
    Mutant(
        "lost-cache-not-released",
        "released = tuple(Compute(Release(session)) for session in held if session in over)",
        "released = tuple(Compute(Release(session)) for session in state.kept if session in over)",
        "test_losing_one_ends_its_sessions_alone",
    ),
    Mutant(
        "lost-next-stage-not-noticed",
        "if draft not in state.peers or not (config.last or config.after in state.peers):",
        "if draft not in state.peers:",
        "test_a_session_that_opens_while_the_next_stage_is_away_is_over_before_it_began",
    ),
    Mutant(
        "lost-draft-node-not-noticed",
        "if draft not in state.peers or not (config.last or config.after in state.peers):",
        "if not (config.last or config.after in state.peers):",
        "test_nothing_is_opened_for_a_draft_node_that_is_gone",
    ),
    Mutant(
        "lost-link-keeps-its-account",
        "inflows = {rank: inflow for rank, inflow in state.inflows.items() if rank != peer}",
        "inflows = dict(state.inflows)",
        "test_a_session_opened_by_nobody_who_is_linked",
    ),
    Mutant(
        "lost-next-stage-not-told",
        "if (peer == config.after and not config.last) or (is_draft(peer) and config.slots):",
        "if is_draft(peer) and config.slots:",
        "test_losing_the_next_stage_is_told_to_the_draft_node",
    ),
    Mutant(
        "lost-session-computed",
        "known = closing if name in closing else sessions\n",
        "known = sessions\n",
        "test_close_frees_everything_and_gives_account",
    ),
    Mutant(
        "owner-of-segments-not-checked",
        "check_owner(message.session, peer)\n    inflow",
        "inflow",
        "test_a_stage_hears_of_a_session_from_its_own_draft_node_only",
    ),
    Mutant(
        "owner-of-shared-prompt-not-checked",
        "check_owner(message.like, peer)",
        "check_owner(message.session, peer)",
        "test_a_stage_hears_of_a_session_from_its_own_draft_node_only",
    ),
    Mutant(
        "owner-gets-others-verdicts",
        "return Send(owner(session.session), message, features)",
        "return Send(Rank(0), message, features)",
        "test_sessions_of_several_draft_nodes_share_a_pass_and_each_hears_of_its_own",
    ),
    Mutant(
        "owner-of-tenants-prompt-not-checked",
        "if one.tenant != prompt.tenant:",
        "if one.tenant and not prompt.tenant:",
        "test_a_tenant_reuses_its_own_prompts_only",
    ),
)
