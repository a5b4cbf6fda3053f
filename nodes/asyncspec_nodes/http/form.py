"""What differs between the two kinds of completions, as the rest of the service sees it. Pure."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_nodes.http.logprobs import Step
from asyncspec_protocol.messages import Submit

Choice = dict[str, object]


class Form(Protocol):
    """How answers of one kind are written."""

    # ``object`` of a whole answer and of a piece of one, and what its id begins with.
    whole_name: str
    piece_name: str
    id_prefix: str
    # The parameter that has the prompt.
    prompt_name: str

    def first(self) -> Choice | None:
        """What a stream says of an answer before its text, if anything."""

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """Text, and what was said of its tokens; ``offset``: characters of earlier tokens."""

    def last(self) -> Choice:
        """What the end of a streamed answer has beside its reason."""

    def whole(self, text: str, said: list[Step]) -> Choice:
        """An answer at once."""


class Asked(Struct, frozen=True):
    """A request, understood: what is asked of the cluster, and how the answer is written."""

    form: Form
    # The answers to the first prompt, then those to the second, ...
    submits: tuple[Submit, ...]
    # Answers to each prompt.
    choices: int
    # What all answers' seeds come from; said in the answer, so that it can be had again.
    seed: int
    stream: bool
    include_usage: bool
    details: bool

    def of_tenant(self, tenant: str) -> Asked:
        """The same, asked by a tenant (see ``Submit.tenant``)."""
        return replace(self, submits=tuple(replace(one, tenant=tenant) for one in self.submits))

    def prompt_of(self, index: int) -> int:
        """The prompt that the ``index``-th answer is one to."""
        return index // self.choices
