"""Names for the integers that travel: a rank is not a session is not a node."""

from __future__ import annotations

from typing import NewType

Rank = NewType("Rank", int)
"""0 is the draft node, 1..N are the verify stages in pipeline order."""

SessionId = NewType("SessionId", int)
"""One request's life inside one pipeline. Grows for ever, also over restarts of a draft node."""

NodeId = NewType("NodeId", int)
"""One token of a session's tree. Issued by the draft node, never reused, never renumbered."""

Version = NewType("Version", int)
"""Counter of prunes of a session; 0 before the first."""

SegmentId = NewType("SegmentId", int)
"""Counter of segments of a session."""

DRAFT = Rank(0)
NO_PARENT = NodeId(-1)
"""Parent of the first prompt token."""
