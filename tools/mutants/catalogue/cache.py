"""Cache slots: who sits where, what a row sees, what is shared, and how many slots there are."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

CACHE: tuple[Mutant, ...] = (
    Mutant(
        "slot-reused",
        "start, tip, slot = slots.committed, slots.tip, slots.used",
        "start, tip, slot = slots.committed, slots.tip, slots.used - bool(slots.speculative)",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-ancestor-hidden",
        "visible = visible[bisect_left(visible, start) :]",
        "visible = visible[bisect_left(visible, start) + 1 :]",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-position-too-deep",
        "rows.append(Row(slot, start + len(visible) - 1, visible))",
        "rows.append(Row(slot, start + len(visible), visible))",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-ancestors-not-moved",
        "n: CacheSlot(s.parent) if s.ancestor_slots else s for n, s in",
        "n: s for n, s in",
        "test_a_row_sees_its_ancestors_and_itself",
    ),
    Mutant(
        "slot-any-parent",
        "elif parent == tip:",
        "elif parent is not None:",
        "test_allocate_refuses_missing_parents_and_known_nodes",
    ),
    Mutant(
        "slot-node-twice",
        "if start + len(speculative) != slot:",
        "if start + len(speculative) > slot:",
        "test_allocate_refuses_missing_parents_and_known_nodes",
    ),
    Mutant(
        "slot-frontier-not-moved",
        "return _commit(SlotTable(slots.committed, slots.tip, kept), committed), stay",
        "return SlotTable(slots.committed, slots.tip, kept), stay",
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
        "slot-last-prompt-row-not-verified",
        "start = liveness.prompt_length - 1",
        "start = liveness.prompt_length",
        "test_a_segment_becomes_a_pass_and_a_verdict",
    ),
    Mutant(
        "slot-committed-of-next-pass",
        "committed=session.slots.committed,\n        rows=rows,",
        "committed=slots.committed,\n        rows=rows,",
        "test_texts_are_exact_and_nothing_is_left",
    ),
    Mutant(
        "share-of-prompt-not-read",
        "keep = message.keep and session.slots.committed >= length",
        "keep = message.keep",
        "test_only_a_prompt_that_was_read_is_kept",
    ),
    Mutant(
        "share-keeps-the-answer-too",
        "Trim(name, length) if keep",
        "Trim(name, session.slots.used) if keep",
        "test_only_a_prompt_that_was_read_is_kept",
    ),
    Mutant(
        "share-keeps-for-ever",
        "return replace(state, cached_prompts=cached), (Compute(Release(name)), *empty)",
        "return replace(state, cached_prompts=cached), empty",
        "test_a_prompt_that_is_kept_and_closed_is_released",
    ),
    Mutant(
        "share-more-than-there-is",
        "if message.common_prefix > cached:",
        "if message.common_prefix > cached + 1:",
        "test_a_prompt_that_is_shared_is_all_there",
    ),
    Mutant(
        "share-of-uncommitted-slots",
        "return parent.slots.committed",
        "return parent.slots.used",
        "test_a_prompt_that_is_shared_is_all_there",
    ),
    Mutant(
        "share-tip-too-high",
        "SlotTable(message.common_prefix, NodeId(message.common_prefix - 1)),",
        "SlotTable(message.common_prefix, NodeId(message.common_prefix - 2)),",
        "test_a_prompt_that_is_shared_is_all_there",
    ),
    Mutant(
        "share-last-token-of-prompt",
        "length = common_prefix_length(one.prefix[:-1], prompt.prefix[:-1])",
        "length = common_prefix_length(one.prefix, prompt.prefix)",
        "test_texts_are_exact_and_nothing_is_left",
    ),
    Mutant(
        "share-where-penalties-count",
        "length = min(length, prompt.shareable)",
        "length = min(length, prompt.shareable or length)",
        "test_penalties_read_the_whole_prompt",
    ),
    Mutant(
        "room-one-node-too-many",
        "if first and slots > session.max_slots:",
        "if first and slots > session.max_slots + 1:",
        "test_a_session_has_room_for_what_it_was_opened_for",
    ),
    Mutant(
        "room-queue-not-counted",
        "sum([len(waiting.ids) for waiting in (*before, live)])",
        "len(live.ids)",
        "test_a_session_with_more_live_nodes_than_it_was_opened_for",
    ),
    Mutant(
        "room-of-largest-stage",
        "return min((n for rank, n in state.slots.items() if n and rank <= stages), default=None)",
        "return max((n for rank, n in state.slots.items() if n and rank <= stages), default=None)",
        "test_the_smallest_stage_decides_and_order_is_kept",
    ),
    Mutant(
        "room-taken-before-it-is-free",
        "return sessions + cached + sum(one.slots for one in state.pending_releases)",
        "return sessions + cached + sum(o.slots for o in state.pending_releases if o.is_prompt)",
        "test_an_end_without_all_accounts_frees_nothing",
    ),
    Mutant(
        "room-free-with-first-account",
        "replace(one, missing=one.missing - {rank}) if is_free(one) else one",
        "replace(one, missing=frozenset()) if is_free(one) else one",
        "test_an_end_without_all_accounts_frees_nothing",
    ),
    Mutant(
        "room-free-at-the-floor",
        "lambda one: one.session < floor",
        "lambda one: one.session <= floor",
        "test_a_reconnected_stage_has_freed_sessions_below_the_floor",
    ),
    Mutant(
        "room-of-kept-prompt-free",
        "lambda one: one.session == name and not (one.is_prompt and kept)",
        "lambda one: one.session == name",
        "test_an_account_that_keeps_the_prompt_frees_the_rest_alone",
    ),
    Mutant(
        "room-without-answer",
        "len(request.prompt) + answer + max_tree_nodes(policy, stages))",
        "len(request.prompt) + max_tree_nodes(policy, stages))",
        "test_a_session_takes_its_prompt_its_answer_and_its_policys_tree",
    ),
    Mutant(
        "room-rounded-down",
        "return -(-slots // BLOCK) * BLOCK",
        "return slots // BLOCK * BLOCK",
        "test_a_session_takes_its_prompt_its_answer_and_its_policys_tree",
    ),
    Mutant(
        "room-not-shared",
        "slots = max(1, config.slots // len(state.drafts)) if config.slots else 0",
        "slots = config.slots",
        "test_each_may_count_on_its_share_of_the_cache",
    ),
)
