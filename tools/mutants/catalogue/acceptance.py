"""Acceptance: which tokens count, where an answer ends, and how a token is drawn."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

ACCEPTANCE: tuple[Mutant, ...] = (
    Mutant(
        "accept-no-bonus",
        "return Walk(tuple(accepted), token)",
        "return Walk(tuple(accepted), None)",
        "test_a_first_token_that_was_not_guessed_plants_a_new_root",
    ),
    Mutant(
        "accept-one-node-too-many",
        "tokens = tokens if walked.bonus is None else (*tokens, walked.bonus)",
        "tokens = tokens if walked.bonus is None else (*tokens, walked.bonus, walked.bonus)",
        "test_an_answer_ends_with_its_stop_token_and_its_limit",
    ),
    Mutant(
        "accept-stop-token-left-out",
        'return tokens[: i + 1], "stop"',
        'return tokens[:i], "stop"',
        "test_an_answer_ends_with_its_stop_token_and_its_limit",
    ),
    Mutant(
        "accept-past-the-limit",
        'return tokens[:left], "length" if len(tokens) >= left else ""',
        'return tokens[:left], "length" if len(tokens) > left else ""',
        "test_an_answer_ends_with_its_stop_token_and_its_limit",
    ),
    Mutant(
        "accept-root-below-wrong-node",
        "parent, root = tip, session.next_node",
        "parent, root = session.tree.root, session.next_node",
        "test_texts_are_exact_and_nothing_is_left",
    ),
    Mutant(
        "accept-root-id-used-again",
        "next_node=NodeId(root + 1),",
        "next_node=NodeId(root),",
        "test_ids_are_never_used_again",
    ),
    Mutant(
        "accept-draft-ids-used-again",
        "next_node=NodeId(session.next_node + len(new)),",
        "next_node=NodeId(session.next_node + max(0, len(new) - 1)),",
        "test_ids_are_never_used_again",
    ),
    Mutant(
        "accept-siblings-of-one-token",
        "existing = index.get((above, token))",
        "existing = index.get((above, -1))",
        "test_fig_4_appends_only_what_is_new_in_the_fresh_trees_order",
    ),
    Mutant(
        "accept-too-many-nodes",
        "if len(new) >= limit or (max_position is not None and data.position >= max_position):",
        "if len(new) > limit or (max_position is not None and data.position >= max_position):",
        "test_merge_keeps_to_its_bounds",
    ),
    Mutant(
        "accept-nodes-too-deep",
        "if len(new) >= limit or (max_position is not None and data.position >= max_position):",
        "if len(new) >= limit or (max_position is not None and data.position > max_position):",
        "test_merge_keeps_to_its_bounds",
    ),
    Mutant(
        "accept-answer-cut-one-late",
        "if not 0 < kept <= len(tokens):",
        "if not 0 <= kept <= len(tokens):",
        "test_an_answer_that_is_cut_keeps_its_first_tokens",
    ),
    Mutant(
        "accept-answer-not-cut",
        "return replace(self, resumed=resumed, committed=self.committed[: kept - len(resumed)])",
        "return replace(self, resumed=resumed)",
        "test_an_answer_that_is_cut_keeps_its_first_tokens",
    ),
    Mutant(
        "accept-features-of-dead-nodes",
        "held = {node: row for node, row in self.held.items() if node in tree}",
        "held = self.held",
        "test_the_source_reads_the_prompt_behind_the_stages_and_the_tree_as_it_is_accepted",
    ),
    Mutant(
        "accept-features-out-of-order",
        "if prompt != tuple(range(self.recorded, end)) or (verdict.ids and end < last):",
        "if len(prompt) != end - self.recorded or (verdict.ids and end < last):",
        "test_features_that_are_not_those_that_must_come",
    ),
    Mutant(
        "draw-noise-of-another-position",
        "GOLDEN * (position + 1)",
        "GOLDEN * (position + 2)",
        "test_golden_values_never_change",
    ),
    Mutant(
        "draw-noise-of-another-token",
        "_GOLDEN * (tokens.astype(np.uint64) + _1)",
        "_GOLDEN * (tokens.astype(np.uint64) + _1 + _1)",
        "test_noise_is_that_of_rng_bit_for_bit",
    ),
    Mutant(
        "draw-penalty-of-prompt",
        "counts[token] = count + (position >= self._prompt)",
        "counts[token] = count + (position > self._prompt)",
        "test_a_rows_counts_are_those_of_its_path",
    ),
    Mutant(
        "draw-penalty-of-prompt-when-committed",
        "self.counts.get(token, 0) + (slot >= self._prompt)",
        "self.counts.get(token, 0) + (slot > self._prompt)",
        "test_a_rows_counts_are_those_of_its_path",
    ),
    Mutant(
        "verdicts-of-the-dead-kept",
        "for n, o in _target_outputs(session, verdict) if n in session.sent}",
        "for n, o in _target_outputs(session, verdict)}",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "sent-nodes-of-the-dead-kept",
        "sent={n: segment for n, segment in session.sent.items() if n in tree},",
        "sent=session.sent,",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "hits-behind-the-end",
        "hits = min(len(tokens), len(walked.accepted))",
        "hits = len(walked.accepted)",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "log-probs-of-the-next-node",
        "path = (session.tree.root, *walked.accepted)\n        outputs",
        "path = (*walked.accepted, session.tree.root)\n        outputs",
        "test_log_probs_of_tokens_are_those_of_the_target_alone",
    ),
    Mutant(
        "verdict-tokens-of-first-rows",
        "tokens=tuple([tokens[i] for i in verified]),",
        "tokens=tokens[: len(verified)],",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "verdict-log-probs-of-first-rows",
        "token_log_probs=tuple([log_probs[i] for i in verified])",
        "token_log_probs=log_probs[: len(verified)]",
        "test_log_probs_of_tokens_are_those_of_the_target_alone",
    ),
    Mutant(
        "verdict-top-tokens-of-first-rows",
        "likeliest = [top_tokens[i] for i in verified] if",
        "likeliest = list(top_tokens[: len(verified)]) if",
        "test_log_probs_of_tokens_are_those_of_the_target_alone",
    ),
    Mutant(
        "verdicts-counted-over-links",
        "remaining = behind[send.to]",
        "remaining = sum(behind.values())",
        "test_sessions_of_several_draft_nodes_share_a_pass_and_each_hears_of_its_own",
    ),
    Mutant(
        "counts-of-a-later-pass",
        "if committed < self._committed:",
        "if committed < 0:",
        "test_an_earlier_pass_of_a_batch_counts_its_own_committed_path",
    ),
    Mutant(
        "min-tokens-one-too-many",
        "if position - start < constraint.min_tokens:",
        "if position - start <= constraint.min_tokens:",
        "test_every_law_holds_whatever_fails[0]",
    ),
)
