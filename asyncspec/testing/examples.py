"""How checks generate what they try."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def unhurried(max_examples: int) -> settings:
    """So many examples, however long each takes: on a busy machine a law is no less one."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=slow)
