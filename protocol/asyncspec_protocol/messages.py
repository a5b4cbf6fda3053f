"""The words on the wire, all of them; they stand in files by what they are about.

Their law: every message is one flat struct with an explicit tag; fields are only ever appended,
with a default; every field says why it travels. Node ids name everything, because positions in
somebody's array shift with every prune and ids do not (docs/reference/protocol.md).
"""

from __future__ import annotations

from .drafting import Expand, Expanded, Withdraw
from .links import PROTOCOL_VERSION, Clock, Fault, Heartbeat, Hello, Ready, Role, Welcome
from .pipeline import Credit, Floor, PruneIndices, Segment, Verdict
from .requests import Cancel, Finished, Output, Submit
from .scheduling import PassTimes, PlanStatus, PlanStatusRequest, Rates, Schedule
from .sessions import FINAL, Close, Closed, Open
from .watching import Collect, Events, Inspect, Status

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

__all__ = [
    "FINAL",
    "PROTOCOL_VERSION",
    "Cancel",
    "Clock",
    "Close",
    "Closed",
    "Collect",
    "Credit",
    "Events",
    "Expand",
    "Expanded",
    "Fault",
    "Finished",
    "Floor",
    "Heartbeat",
    "Hello",
    "Inspect",
    "Message",
    "Open",
    "Output",
    "PassTimes",
    "PlanStatus",
    "PlanStatusRequest",
    "PruneIndices",
    "Rates",
    "Ready",
    "Role",
    "Schedule",
    "Segment",
    "Status",
    "Submit",
    "Verdict",
    "Welcome",
    "Withdraw",
]
