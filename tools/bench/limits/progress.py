"""What a measurement tells of how far it is."""

from collections.abc import Callable

Tick = Callable[[], None]
"""Called once for each step that is done."""
