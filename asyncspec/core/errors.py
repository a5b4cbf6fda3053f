"""Errors of asyncspec, by whose fault they are.

AsyncSpecError
├── UserError        a wrong argument, file or setting: one line, exit code 2, no traceback
│   └── CheckpointError   a model directory that is missing, broken or cannot work here
└── ClusterError     a node, link or device failed while we ran: one line, exit code 1
(ProtocolError, for what a peer or our own machines say, is in ``asyncspec_protocol.errors``.)
"""

from __future__ import annotations


class AsyncSpecError(Exception):
    """Base of all of them; the text is a sentence for a person."""


class UserError(AsyncSpecError):
    """The user can mend it; the text says what to change."""


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or has a feature that cannot work."""


class ClusterError(AsyncSpecError):
    """Something outside this process failed."""


def first_line(error: BaseException) -> str:
    """What an error says, in short; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]
