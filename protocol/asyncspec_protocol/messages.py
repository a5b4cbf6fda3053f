"""All messages of the wire; they stand in modules by subject.

Every message is one flat struct with an explicit tag; fields are only ever appended, with a
default; every field says why it travels. Nodes are named by id, because positions in an array shift
with every prune and ids do not (docs/reference/protocol.md).
"""

from __future__ import annotations

from .clients import Cancel, Collect, Events, Finished, Inspect, Output, Status, Submit
from .links import PROTOCOL_VERSION as PROTOCOL_VERSION
from .links import Clock, Fault, Heartbeat, Hello, Ready, Welcome
from .links import Role as Role
from .scheduling import PassTimes, PlanStatus, PlanStatusRequest, Rates, Schedule
from .sessions import FINAL as FINAL
from .sessions import (
    Close,
    Closed,
    Credit,
    Expand,
    Expanded,
    Floor,
    Open,
    PruneIndices,
    Segment,
    Verdict,
    Withdraw,
)

Message = (
    Segment
    | Verdict
    | PruneIndices
    | Expand
    | Expanded
    | Withdraw
    | Hello
    | Welcome
    | Ready
    | Open
    | Floor
    | Close
    | Closed
    | Credit
    | PassTimes
    | Rates
    | Schedule
    | Heartbeat
    | Clock
    | Fault
    | Submit
    | Output
    | Finished
    | Cancel
    | Collect
    | Events
    | Inspect
    | Status
    | PlanStatusRequest
    | PlanStatus
)
