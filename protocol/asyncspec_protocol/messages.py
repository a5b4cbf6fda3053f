"""All messages of the wire; each is defined in the module of its subject.

Every message is one flat struct with an explicit tag; fields are only ever appended, with a
default; every field says why it travels. Nodes are named by id, because positions in an array shift
with every prune and ids do not (docs/reference/protocol.md).
"""

from __future__ import annotations

from .base import FINAL as FINAL
from .base import PromptLogprobs as PromptLogprobs
from .clients import *  # noqa: F403
from .clients import ClientMessage
from .links import *  # noqa: F403
from .links import LinkMessage
from .scheduling import *  # noqa: F403
from .scheduling import SchedulingMessage
from .sessions import *  # noqa: F403
from .sessions import SessionMessage

Message = SessionMessage | LinkMessage | SchedulingMessage | ClientMessage
