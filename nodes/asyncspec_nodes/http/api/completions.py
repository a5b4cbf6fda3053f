"""The OpenAI completion endpoints: their requests, and the JSON objects of their answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.errors import ALIVE, DONE, HEADERS, ApiError, frame, invalid
from asyncspec_nodes.http.api.parameters import MAX_CHOICES, CompletionParameters, seed_of_choice
from asyncspec_nodes.http.api.prompt_scores import PromptPosition, ranked
from asyncspec_nodes.http.api.timings import timings
from asyncspec_protocol.limits import MAX_TOKEN
from asyncspec_protocol.messages import Finished, Submit
from asyncspec_protocol.sampling import MAX_INT, TopLogprobs

_UNSCORED: dict[str, Any] = {"echo": False, "prompt_logprobs": -1}
"""Fields of further answers to a prompt: its scores come with the first answer."""

FINGERPRINT = f"asyncspec-{version('asyncspec')}"

Json = dict[str, object]


class Completion:
    """A checked request of either endpoint: its ``submits``, one for each answer, with the answers
    to one prompt in a row; and the JSON of its answers."""

    full_object: str
    chunk_object: str
    id_prefix: str
    # The parameter blamed in errors of a prompt.
    prompt_name: str
    # Chunks before any text, and with the finish reason.
    first_choice: ClassVar[Json] = {}
    last_choice: ClassVar[Json]

    def __init__(
        self, request: CompletionParameters, submits: Sequence[Submit], context: RequestContext
    ) -> None:
        self._seed = context.seed if request.seed is None else request.seed
        self._choices = request.choices
        # Answers to each prompt, of which the best ``_choices`` are returned.
        self._candidates = request.candidates
        compared = self._candidates > self._choices
        self.stream = bool(request.stream)
        self.submits = tuple(
            replace(
                submit,
                seed=seed_of_choice(self._seed, choice),
                log_probs=submit.log_probs or compared,
                **({} if choice == 0 or self.stream else _UNSCORED),
            )
            for submit in submits
            for choice in range(self._candidates)
        )
        # The parameter blamed in errors of the answer's grammar.
        _, form_name = request.form()
        self.form_name = self.names.get(form_name, form_name)
        self._logprobs = submits[0].log_probs
        # The prompt's scores have a field of their own in the response.
        self.prompt_logprobs = request.prompt_logprobs
        self._details = bool(request.return_details)
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._counting = bool(self._include_usage and options and options.continuous_usage_stats)
        self._head = {
            "id": self.id_prefix + context.id,
            "created": context.created,
            "model": context.model,
            "system_fingerprint": FINGERPRINT,
        }

    # Names of parameters in another interface, by those of this one.
    names: ClassVar[Mapping[str, str]] = {}

    # Whether ``begin`` says how many tokens the prompt has, which is known with the first token.
    counts_prompt: ClassVar[bool] = False

    # A stream's headers, and what is written where there is nothing to say.
    headers: ClassVar[Mapping[str, str]] = HEADERS
    alive: ClassVar[bytes] = ALIVE

    def choice(self, index: int, answer: ChoiceBuffer) -> Json:
        """A whole answer as an entry of ``choices``."""
        raise NotImplementedError

    def pieces(self, index: int, answer: ChoiceBuffer) -> Iterator[Json]:
        """An answer's output since the last call, as entries of ``choices`` of chunks."""
        raise NotImplementedError

    def reason(self, index: int, end: Finished | None) -> str | None:
        """Why an answer ended."""
        return None if end is None else end.reason

    def error_frame(self, error: ApiError) -> bytes:
        """An error in a stream that has begun."""
        return frame(error.body())

    def extra(self, answers: Sequence[ChoiceBuffer]) -> Json:
        """Further fields of a whole response."""
        return {}

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        """The JSON of a whole response."""
        for i, answer in enumerate(answers):
            answer.prompt = answers[i - i % self._candidates].prompt
        choices = [
            self._choice(place, self.choice(i, answers[i]), answers[i].tokens, answers[i].end)
            for place, i in enumerate(self._best(answers))
        ]
        return {
            **self._object(self.full_object, choices),
            "usage": self._usage(answers),
            "seed": self._seed,
            **(self._timings(answers[0].end) if len(answers) == 1 else {}),
            **self.extra(answers),
        }

    def _best(self, answers: Sequence[ChoiceBuffer]) -> list[int]:
        """The answers that are returned: of each prompt's those with the greatest mean
        log-probability of a token, the best first; all of them in their order without
        ``best_of``."""
        if self._candidates == self._choices:
            return list(range(len(answers)))
        found: list[int] = []
        for first in range(0, len(answers), self._candidates):
            group = range(first, first + self._candidates)
            ranked = sorted(group, key=lambda i: answers[i].mean_logprob, reverse=True)
            found += ranked[: self._choices]
        return found

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        """The first frames of a stream."""
        if not self.first_choice:
            return b""
        return b"".join(
            self._chunk(i, self.first_choice, answer) for i, answer in enumerate(answers)
        )

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        """Frames for an answer's output since the last call; may be empty."""
        tokens, frames = answer.tokens, b""
        if answer.prompt_read:
            return self._progress(answer)
        for piece in self.pieces(index, answer):
            frames += self._chunk(index, piece, answer, tokens)
            tokens = []
        if answer.end is not None:
            frames += self._chunk(index, self.last_choice, answer, (), answer.end)
        answer.clear()
        return frames

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        """The last frames of a stream."""
        if not self._include_usage:
            return DONE
        return frame({**self._object(self.chunk_object, []), "usage": self._usage(answers)}) + DONE

    def _object(self, name: str, choices: list[Json]) -> Json:
        return {**self._head, "object": name, "choices": choices}

    def _chunk(
        self,
        index: int,
        choice: Json,
        answer: ChoiceBuffer,
        tokens: Sequence[int] = (),
        end: Finished | None = None,
    ) -> bytes:
        choices = [self._choice(index, choice, tokens, end)]
        usage = {"usage": _counted(answer) if self._counting else None}
        shown = usage if self._include_usage else {}
        common = {**self._object(self.chunk_object, choices), "seed": self._seed}
        return frame({**common, **shown, **self._timings(end)})

    def _progress(self, answer: ChoiceBuffer) -> bytes:
        """llama.cpp's chunk while a prompt is read."""
        progress = {
            "total": answer.prompt_tokens,
            "cache": answer.shared_tokens,
            "processed": answer.prompt_read,
        }
        return frame({**self._object(self.chunk_object, []), "prompt_progress": progress})

    def _timings(self, end: Finished | None) -> Json:
        """llama.cpp's field, at an answer's end."""
        return {} if end is None else {"timings": timings(end.stats)}

    def _choice(
        self, index: int, choice: Json, tokens: Sequence[int], end: Finished | None
    ) -> Json:
        details: Json = {}
        if self._details:
            details["token_ids"] = list(tokens)
            if end is not None:
                details["stats"] = dict(end.stats)
        reason = self.reason(index, end)
        return {"index": index, **choice, "finish_reason": reason, **details}

    def reasoning_tokens(self, answers: Sequence[ChoiceBuffer]) -> int | None:
        """Tokens of the answers that are reasoning; None where nothing can be."""
        return None

    def _usage(self, answers: Sequence[ChoiceBuffer]) -> Json:
        """Token counts. A prompt with several answers counts once: only the first computes it."""
        ends = [one.end.stats if one.end else {} for one in answers]
        each = self._candidates
        prompts = [ends[i : i + each] for i in range(0, len(ends), each)]
        prompt = sum(int(group[-1].get("prompt_tokens", 0)) for group in prompts)
        completion = sum(int(stats.get("new_tokens", 0)) for stats in ends)
        accepted = sum(int(stats.get("hits", 0)) for stats in ends)
        cached = sum(
            min(int(stats.get("shared_tokens", 0)) for stats in group) for group in prompts
        )
        # Drafted tokens that are the target's own choice.
        details = {"accepted_prediction_tokens": accepted}
        if (reasoning := self.reasoning_tokens(answers)) is not None:
            details["reasoning_tokens"] = reasoning
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details,
        }


def _counted(answer: ChoiceBuffer) -> Json:
    """The usage of one answer so far."""
    prompt, new = answer.prompt_tokens, answer.new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


DEFAULT_TOKENS = 16
"""The API's default ``max_tokens``."""


class CompletionRequest(CompletionParameters, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    # Text, token ids, or a list of either.
    prompt: object
    # True is 1.
    logprobs: TopLogprobs | bool | None = None
    # Answers begin with their prompts.
    echo: bool | None = None
    # What follows the text that is to be filled in.
    suffix: str | None = None
    # 0: the prompt alone is read.
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None

    def check(self) -> None:
        super().check()
        if self.given_token_ids and self.echo:
            raise invalid("echo is not for an answer that goes on; leave one out", "echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in _prompts(self.prompt)):
            raise invalid("suffix is for prompts of text", "suffix")

    @property
    def likeliest(self) -> int | None:
        """Tokens in the place of each, with their log-probabilities; None: none are asked for."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    @property
    def scored(self) -> int:
        count = self.likeliest
        return max(super().scored, -1 if count is None or not self.echo else count)

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        submit = replace(
            self.submit(DEFAULT_TOKENS if self.limit is None else self.limit, context.tenant),
            id=context.id,
            log_probs=self.likeliest is not None,
            top_logprobs=self.likeliest or 0,
            suffix=self.suffix or "",
        )
        submits = [
            replace(submit, prompt=prompt)
            if isinstance(prompt, str)
            else replace(submit, prompt_ids=prompt, echo=submit.echo or bool(self.echo))
            for prompt in _prompts(self.prompt)
        ]
        if len(submits) * self.candidates > MAX_CHOICES:
            raise invalid(f"more than {MAX_CHOICES} answers are asked for", "prompt")
        if len(submits) > 1 and submit.given:
            raise invalid("given_token_ids is for one prompt", "given_token_ids")
        return TextCompletion(self, submits, context)


def _prompts(given: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return tuple(one if isinstance(one, str) else _tokens(one) for one in given)
    return (_tokens(given),)


def _tokens(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    for token in given:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise invalid("prompt: a token is a number that is not below 0", "prompt")
    return tuple(given)


class TextCompletion(Completion):
    full_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_name = "prompt"
    last_choice: ClassVar[Json] = {"text": "", "logprobs": None}

    def __init__(
        self, request: CompletionRequest, submits: Sequence[Submit], context: RequestContext
    ) -> None:
        super().__init__(request, submits, context)
        self._echo, self._count = bool(request.echo), request.likeliest or 0

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        """The prompts that are repeated and that the draft node need not send."""
        texts = [submit.prompt if self._echo else "" for submit in self.submits]
        return b"".join(
            self._chunk(i, {"text": text, "logprobs": None}, answers[i])
            for i, text in enumerate(texts)
            if text and not self.submits[i].echo
        )

    def choice(self, index: int, answer: ChoiceBuffer) -> Json:
        """See ``Completion``; with ``echo`` texts begin with their prompts."""
        prompt = answer.prompt if self._echo else []
        said = self._content(self._prompt_text(index, prompt) + answer.text, prompt, answer)
        if self.prompt_logprobs is not None:
            said["prompt_logprobs"] = ranked(answer.prompt, self.prompt_logprobs)
        return said

    def pieces(self, index: int, answer: ChoiceBuffer) -> Iterator[Json]:
        prompt = answer.prompt if self._echo and answer.prompt_complete else []
        text = self._prompt_text(index, prompt) if prompt else ""
        if text or answer.text or answer.logprobs or (answer.tokens and self._details):
            yield self._content(text + answer.text, prompt, answer)

    def _prompt_text(self, index: int, prompt: Sequence[PromptPosition]) -> str:
        """The text of a prompt in an answer that begins with it."""
        if not self._echo:
            return ""
        spelled = b"".join(position.spelled for position in prompt)
        return self.submits[index].prompt or spelled.decode(errors="replace")

    def _content(self, text: str, prompt: Sequence[PromptPosition], answer: ChoiceBuffer) -> Json:
        """``prompt``: what of it the text begins with."""
        if not self._logprobs:
            return {"text": text, "logprobs": None}
        answered, count = answer.logprobs, self._count
        texts = [position.text for position in prompt]
        texts += [position.chosen.text for position in answered]
        scores = [position.logprob for position in prompt]
        # The API includes the chosen token.
        likeliest = [position.likeliest(count) for position in prompt]
        for position in answered:
            shown = (*position.top, position.chosen)
            scores.append(position.chosen.logprob)
            likeliest.append({token.text: token.logprob for token in shown})
        offsets = list(accumulate(map(len, texts), initial=answer.offset))[:-1]
        return {
            "text": text,
            "logprobs": {
                "tokens": texts,
                "token_logprobs": scores,
                "top_logprobs": likeliest,
                "text_offset": offsets,
            },
        }
