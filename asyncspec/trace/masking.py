"""Trace lines without what users asked and were told.

Token ids become 0, but for those of segments and verdicts: the analysis follows a session's path by
which of them are equal, so a keyed hash of session and token stands for each. Log-probabilities
become 0 and checksums go, as a guess could be tried against them. Such lines cannot be replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.trace import records
from asyncspec_protocol.messages import (
    Close,
    Expand,
    Expanded,
    Message,
    Open,
    PromptLogprobs,
    Restore,
    Segment,
    Verdict,
)
from asyncspec_protocol.sampling import UNCONSTRAINED


class Mask:
    """Lines of one recording, with a key of its own that nobody keeps."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def line(self, line: records.Record) -> records.Record:
        """A line as it may be shown."""
        match line:
            case records.Step():
                effects = tuple(map(self._effect, line.effects))
                return replace(line, input=self._input(line.input), effects=effects)
            case records.Text():
                return replace(line, tokens=_hidden(line.tokens), text="")
            case records.NodeRecord():
                return replace(line, masked=True)
            case _:
                return line

    def message(self, message: Message) -> Message:
        """A message without tokens."""
        match message:
            case Segment(session=session, tokens=tokens, scored_tokens=scored):
                hashed = self._hashed(session, tokens)
                return replace(message, tokens=hashed, scored_tokens=_hidden(scored))
            case Verdict(session=session, tokens=tokens):
                return replace(
                    message,
                    tokens=self._hashed(session, tokens),
                    top_tokens=_hidden(message.top_tokens),
                    top_token_log_probs=_hidden(message.top_token_log_probs),
                    token_log_probs=_hidden(message.token_log_probs),
                    prompt_logprobs=_unscored(message.prompt_logprobs),
                )
            case Expand():
                return replace(
                    message,
                    committed=_hidden(message.committed),
                    tokens=_hidden(message.tokens),
                    scores=_hidden(message.scores),
                    grammar="",
                )
            case Expanded():
                return _without_tokens(message)
            case Open():
                return replace(message, constraint=UNCONSTRAINED)
            case Close() | Restore():
                return replace(message, stored_as=())  # a guess could be tried against them
            case _:
                return message

    def _input(self, event: records.Input) -> records.Input:
        match event:
            case records.ReceivedMessage(message=message):
                return replace(event, message=self.message(message))
            case records.JobResult():
                return self._result(event)
            case machine.Submitted(request):
                hidden = replace(
                    request,
                    prompt=_hidden(request.prompt),
                    given=_hidden(request.given),
                    stop_tokens=frozenset(),
                    sampling=replace(request.sampling, constraint=UNCONSTRAINED),
                )
                return replace(event, request=hidden)
            case _:
                return event

    def _result(self, result: records.JobResult) -> records.JobResult:
        return replace(
            result,
            tokens=None if result.tokens is None else _hidden(result.tokens),
            expanded=result.expanded and _without_tokens(result.expanded),
            top_tokens=tuple((_hidden(ids), _hidden(scores)) for ids, scores in result.top_tokens),
            token_log_probs=_hidden(result.token_log_probs),
            prompt_logprobs=_unscored(result.prompt_logprobs),
            parts=tuple(map(self._result, result.parts)),
        )

    def _effect(self, effect: records.Effect) -> records.Effect:
        match effect:
            case machine.Emit(tokens=tokens):
                return replace(effect, tokens=_hidden(tokens))
            case records.Sent() | records.Issued() | records.TaskRun():
                return replace(effect, check=0)
            case _:
                return effect

    def _hashed(self, session: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        hashed = []
        for token in tokens:
            text = f"{session} {token}".encode()  # of any size: a peer may claim any number
            digest = hashlib.blake2b(text, digest_size=4, key=self._key).digest()
            hashed.append(int.from_bytes(digest, "little") >> 1)
        return tuple(hashed)


def _without_tokens(tree: Expanded) -> Expanded:
    return replace(tree, tokens=_hidden(tree.tokens), scores=_hidden(tree.scores))


def _unscored(scores: PromptLogprobs | None) -> PromptLogprobs | None:
    if scores is None:
        return None
    likeliest = _hidden(scores.top_tokens)
    ranks = (1,) * len(scores.ranks)
    return PromptLogprobs(_hidden(scores.log_probs), ranks, likeliest, likeliest)


def _hidden(values: Sequence[float]) -> tuple[int, ...]:
    return (0,) * len(values)
