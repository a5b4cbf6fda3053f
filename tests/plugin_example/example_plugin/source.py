"""A token source that always proposes the same token: ``example-repeat:7``."""

from __future__ import annotations

from asyncspec.core.errors import UserError
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Grower, path_grower
from asyncspec.source.registry import SourceKind
from asyncspec_protocol.messages import Expand


class RepeatSource(StateSource[int]):
    """The state of a session is the number of its committed tokens."""

    def __init__(self, token: int) -> None:
        super().__init__(lambda job: 0, lambda count, token: count + 1)
        self._token = token

    def grower(self, job: Expand) -> Grower:
        """The token below every node, with probability .5."""
        return path_grower(lambda path, width: ([self._token], [-0.7]))


def _make(argument: str) -> RepeatSource:
    if not argument.isdecimal():
        raise UserError("example-repeat needs a token id, as in example-repeat:7")
    return RepeatSource(int(argument))


REPEAT = SourceKind(make=_make, takes_setting=True, token_bytes=8)
