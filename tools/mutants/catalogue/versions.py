"""Versions and liveness: which nodes a stage computes, keeps and speaks of."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

VERSIONS: tuple[Mutant, ...] = (
    Mutant(
        "version-old-prune-applied",
        "if prune.version <= self.version:",
        "if prune.version == self.version:",
        "test_prunes_are_idempotent_and_only_the_newest_counts",
    ),
    Mutant(
        "version-youngest-node-dead",
        "return node >= self.horizon or self.committed(node) or node in self.keep",
        "return node > self.horizon or self.committed(node) or node in self.keep",
        "test_liveness_is_the_same_by_every_query",
    ),
    Mutant(
        "version-node-behind-prompt-committed",
        "return node < self.prompt_length or node in self.accepted",
        "return node <= self.prompt_length or node in self.accepted",
        "test_liveness_is_the_same_by_every_query",
    ),
    Mutant(
        "version-young-segment-alive",
        "if keep.issuperset(nodes) or min(nodes) >= horizon:",
        "if keep.issuperset(nodes) or max(nodes) >= horizon:",
        "test_liveness_is_the_same_by_every_query",
    ),
    Mutant(
        "version-stamp-of-last-stage",
        "return min(segment.applied, session.liveness.version)",
        "return max(segment.applied, session.liveness.version)",
        "test_the_stamp_is_the_smallest_version_on_the_way",
    ),
    Mutant(
        "version-not-moved",
        "version = Version(session.version + 1)",
        "version = Version(max(1, session.version))",
        "test_trap_bonus_token_in_a_later_segment_goes_on_with_the_round",
    ),
    Mutant(
        "version-horizon-of-root",
        "horizon=session.next_node,",
        "horizon=session.tree.root,",
        "test_trap_bonus_token_in_a_later_segment_goes_on_with_the_round",
    ),
    Mutant(
        "version-accepted-announced-once",
        "if v > session.acknowledged)",
        "if v > session.version)",
        "test_accepted_nodes_are_repeated_until_every_stage_has_applied_them",
    ),
    Mutant(
        "version-acknowledged-too-early",
        "acknowledged=max(session.acknowledged, verdict.applied),",
        "acknowledged=session.version,",
        "test_accepted_nodes_are_repeated_until_every_stage_has_applied_them",
    ),
    Mutant(
        "version-dead-rows-sent-on",
        "alive, first = survivors(session, part.segment.ids), name not in seen",
        "alive, first = range(own_rows), name not in seen",
        "test_rows_that_die_during_their_pass_are_not_sent_on_and_counted",
    ),
    Mutant(
        "version-dead-rows-computed",
        "return segment.select(alive) if alive else None",
        "return segment if alive else None",
        "test_rows_that_die_in_a_waiting_segment_are_not_computed",
    ),
    Mutant(
        "version-hidden-of-other-rows",
        "tuple([hidden.rows[i] for i in rows])",
        "tuple([hidden.rows[i] for i in range(len(rows))])",
        "test_rows_that_die_in_a_waiting_segment_are_not_computed",
    ),
    Mutant(
        "version-tokens-of-other-rows",
        "tokens=tuple([self.tokens[i] for i in rows]) if self.tokens else (),",
        "tokens=self.tokens[: len(rows)],",
        "test_tokens_go_all_the_way_where_draws_depend_on_them",
    ),
    Mutant(
        "version-abandoned-twice",
        "if running is not None and not running.abandoned:\n        parts",
        "if running is not None:\n        parts",
        "test_a_pass_whose_rows_have_all_died_is_abandoned_once",
    ),
    Mutant(
        "version-verdict-of-abandoned-pass",
        "if mapping is closing or abandoned:",
        "if mapping is closing:",
        "test_a_pass_whose_rows_have_all_died_is_abandoned_once",
    ),
    Mutant(
        "version-prune-leaves-cached-orphans",
        "if slots is not session.slots and (node := orphan(slots)) is not None:",
        "if slots is session.slots and (node := orphan(slots)) is not None:",
        "test_a_prune_that_leaves_a_node_without_its_parent_is_refused",
    ),
    Mutant(
        "version-prune-leaves-orphans",
        "if left and (error := orphan_error(pruned, (), left)):",
        "if not left and (error := orphan_error(pruned, (), left)):",
        "test_a_prune_must_not_leave_what_waits_without_its_parent",
    ),
    Mutant(
        "verdict-of-version-never-announced",
        "if verdict.applied > session.version:",
        "if verdict.applied > session.version + 1:",
        "test_messages_that_a_stage_must_not_send",
    ),
)
