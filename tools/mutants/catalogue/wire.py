"""The wire: sizes, numbers and identities that a peer may claim."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

WIRE: tuple[Mutant, ...] = (
    Mutant(
        "wire-header-too-large",
        "if not 0 < header <= limits[0] or tensor > limits[1]:",
        "if not 0 < header <= limits[0] + 1 or tensor > limits[1]:",
        "test_sizes_are_refused_before_anything_is_allocated",
    ),
    Mutant(
        "wire-tensor-too-large",
        "if not 0 < header <= limits[0] or tensor > limits[1]:",
        "if not 0 < header <= limits[0] or tensor > limits[1] + 1:",
        "test_sizes_are_refused_before_anything_is_allocated",
    ),
    Mutant(
        "wire-strangers-trusted",
        "if self.trusted else (",
        "if self is not None else (",
        "test_a_stranger_gets_no_more_than_a_hello_needs",
    ),
    Mutant(
        "wire-tensor-of-another-shape",
        "if tensor != (0 if header.tensor is None else header.tensor.nbytes):",
        "if tensor < (0 if header.tensor is None else header.tensor.nbytes):",
        "test_the_prefix_and_the_header_agree_on_the_tensor",
    ),
    Mutant(
        "wire-bytes-read-twice",
        "self._start += here\n",
        "self._start += 0\n",
        "test_any_cutting_gives_the_same_frames",
    ),
    Mutant(
        "wire-buffer-shared",
        "part = allocate(size)",
        "part = self._ahead[:size] if size <= 8 else allocate(size)",
        "test_a_tensor_has_a_buffer_of_its_own",
    ),
    Mutant(
        "wire-node-twice-in-segment",
        "require(len(set(ids)) == count,",
        "require(len(set(ids)) <= count,",
        "test_invalid_messages_are_refused",
    ),
    Mutant(
        "wire-parent-is-its-own",
        "require(all(map(lt, self.parents, ids)),",
        "require(all(map(lt, self.parents, ids[1:])),",
        "test_invalid_messages_are_refused",
    ),
    Mutant(
        "wire-verdict-without-tokens",
        "require(len(self.tokens) == nodes,",
        "require(len(self.tokens) <= nodes,",
        "test_invalid_messages_are_refused",
    ),
    Mutant(
        "wire-counts-overflow",
        "Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]",
        "Count = Annotated[int, Meta(ge=0)]",
        "test_invalid_messages_are_refused",
    ),
    Mutant(
        "wire-times-of-nan",
        "\nSeconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]",
        "\nSeconds = float",
        "test_invalid_messages_are_refused",
    ),
    Mutant(
        "wire-token-outside-vocabulary",
        "if max((*message.tokens, *message.scored_tokens), default=0) >= state.config.vocab:",
        "if max((*message.tokens, *message.scored_tokens), default=0) > state.config.vocab:",
        "test_a_token_outside_the_vocabulary_is_the_peers_fault",
    ),
    Mutant(
        "wire-drafted-token-outside-vocabulary",
        "if max(answer.tokens, default=0) >= state.config.vocab:",
        "if max(answer.tokens, default=0) > state.config.vocab:",
        "test_a_source_names_tokens_of_the_vocabulary",
    ),
    Mutant(
        "wire-verdict-on-node-never-sent",
        "if any(n in prompt for n in named) or any(n not in session.sent for n in unsent):",
        "if any(n in prompt for n in named):",
        "test_a_verdict_on_what_still_waits_for_credit",
    ),
    Mutant(
        "wire-verdict-on-prompt-never-sent",
        "if any(n in prompt for n in named) or any(n not in session.sent for n in unsent):",
        "if any(n not in session.sent for n in unsent):",
        "test_features_of_a_prompt_that_was_not_sent",
    ),
    Mutant(
        "peer-of-another-cluster",
        "if peer.cluster != me.cluster and not nameless:",
        "if peer.cluster != me.cluster and peer.cluster:",
        "test_no_node_is_without_a_name",
    ),
    Mutant(
        "peer-client-with-a-rank",
        "return None if peer.rank == NO_RANK else named",
        "return None if peer.rank >= NO_RANK else named",
        "test_a_client_may_not_bear_a_rank",
    ),
    Mutant(
        "peer-of-the-same-rank",
        "if peer.rank == me.rank or not (drafts or 0 < peer.rank <= me.stages + 1):",
        "if not (drafts or 0 < peer.rank <= me.stages + 1):",
        "test_a_refusal_says_what_to_change",
    ),
    Mutant(
        "peer-with-another-role",
        "if peer.role != role_of(peer.rank, me.stages):",
        "if peer.role == role_of(peer.rank, me.stages) and not peer.role:",
        "test_a_refusal_says_what_to_change",
    ),
    Mutant(
        "peer-of-another-model",
        "if peer.fingerprint != me.fingerprint:",
        "if not peer.fingerprint:",
        "test_a_refusal_says_what_to_change",
    ),
    Mutant(
        "peer-with-a-gap-between-layers",
        "if first.layers[1] == second.layers[0]:",
        "if first.layers[1] <= second.layers[0]:",
        "test_a_refusal_says_what_to_change",
    ),
    Mutant(
        "peer-sessions-of-two-drafts-meet",
        "return SessionId(draft_number(rank) << _SESSION_BITS)",
        "return SessionId(draft_number(rank) << (_SESSION_BITS - 1))",
        "test_a_session_names_its_draft_node",
    ),
)
