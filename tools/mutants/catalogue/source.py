"""The token source: what it reads and answers, features of the target, and grammars."""

from __future__ import annotations

from tools.mutants.mutant import Mutant

SOURCE: tuple[Mutant, ...] = (
    Mutant(
        "source-length-of-session",
        "source_length=request.length,",
        "source_length=state.sessions[job.session].length,",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "two-draft-requests",
        "if session.draft_request is not None or not session.policy.uses_draft:",
        "if not session.policy.uses_draft:",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "draft-answer-of-other-base",
        "request is None or answer.base != request.length:\n            raise Remote",
        "request is None:\n            raise Remote",
        "test_a_source_answers_what_it_was_asked_and_once",
    ),
    Mutant(
        "features-of-new-tip-passed",
        "path if bonus is not None else path[:-1]",
        "path",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "features-fed-from-before",
        "replace(self, fed=self.recorded, unfed=())",
        "replace(self, unfed=())",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "features-unfed-again",
        "replace(self, fed=self.recorded, unfed=())",
        "replace(self, fed=self.recorded)",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "source-two-requests",
        "if current.request is not None or job.base != current.length:",
        "if job.base != current.length:",
        "test_draft_requests_must_continue_one_another",
    ),
    Mutant(
        "source-other-base",
        "if current.request is not None or job.base != current.length:",
        "if current.request is not None:",
        "test_draft_requests_must_continue_one_another",
    ),
    Mutant(
        "source-expands-below-floor",
        "    if job.session < _floor(state, peer):\n        return state, ()",
        "    if job.session < 0:\n        return state, ()",
        "test_a_draft_request_of_a_session_that_is_over",
    ),
    Mutant(
        "source-features-below-floor",
        "    if session < _floor(state, peer):\n        return state\n",
        "    if session < 0:\n        return state\n",
        "test_features_of_a_session_that_is_over",
    ),
    Mutant(
        "source-ahead-of-features",
        "length > current.featured + 1:",
        "length > current.featured + 2:",
        "test_features_that_cannot_be",
    ),
    Mutant(
        "source-fed-twice",
        "current = replace(current, length=length, request=job, fed=())",
        "current = replace(current, length=length, request=job)",
        "test_features_are_fed_with_the_request_that_they_come_for",
    ),
    Mutant(
        "source-sessions-of-all",
        "len(_of(state, peer)) >= limit:",
        "len(state.sessions) >= limit:",
        "test_a_draft_node_has_no_more_sessions_here_than_it_may_have_at_a_time",
    ),
    Mutant(
        "grammar-reads-twice",
        "            self._matched = self._committed\n",
        "            pass\n",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "grammar-reads-prompt-rows",
        "path[max(0, self._prompt - self._committed) :]",
        "path",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "source-grammar-not-released",
        "        self._sessions.pop(session, None)\n        self._source.release(session)",
        "        self._source.release(session)",
        "test_every_law_holds_whatever_fails[0]",
    ),
    Mutant(
        "source-drafts-for-closed",
        "waiting = tuple(job for job in state.waiting if job.session not in over)",
        "waiting = state.waiting",
        "test_every_law_holds_whatever_fails[0]",
    ),
)
