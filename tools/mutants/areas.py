"""Modules whose every line matters, with the tests that must notice a mistake in them.

A mutant runs against those tests of its area that call its function.
"""

from __future__ import annotations

from msgspec import Struct

PACKAGES = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes")

_ROLES = "nodes/asyncspec_nodes/roles"
_WHOLE = (
    "tests/sim/test_fixed_schedules.py",
    "tests/sim/test_lossless.py",
    "tests/sim/test_fault_schedules.py",
)
"""Simulated clusters under all laws."""

_NODES = tuple(
    f"tests/nodes/test_{name}.py"
    for name in ("boundary_conditions", "byzantine_peer", "draft", "shared_stages", "verify")
)
"""Each machine by itself, event by event."""


class Area(Struct, frozen=True):
    """Files relative to the repository."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "acceptance": Area(
        (
            "asyncspec/core/accept.py",
            "asyncspec/core/feature_log.py",
            "asyncspec/core/rng.py",
            "asyncspec/core/sampling.py",
            "asyncspec/core/tree.py",
            "asyncspec/backend/tree_stage.py",
            f"{_ROLES}/draft/verdicts.py",
            f"{_ROLES}/verify/segments.py",
        ),
        (
            "tests/core/test_rng.py",
            "tests/core/test_sampling.py",
            "tests/core/test_tree.py",
            "tests/sim/test_prompt_logprobs.py",
            "tests/sim/test_top_logprobs.py",
            *_NODES,
            *_WHOLE,
        ),
    ),
    "cache": Area(
        (
            "asyncspec/core/kv_slots.py",
            "asyncspec/core/liveness.py",
            f"{_ROLES}/draft/admission.py",
            f"{_ROLES}/draft/memory_bound.py",
            f"{_ROLES}/draft/prefix_cache.py",
            f"{_ROLES}/verify/session.py",
        ),
        (
            "tests/core/test_kv_slots.py",
            "tests/nodes/test_admission.py",
            "tests/nodes/test_pending_releases.py",
            "tests/nodes/test_prefix_cache.py",
            "tests/sim/test_cache_capacity.py",
            *_NODES,
            *_WHOLE,
        ),
    ),
    "flow": Area(
        (
            f"{_ROLES}/draft/machine.py",
            f"{_ROLES}/draft/scheduler.py",
            f"{_ROLES}/verify/flow_control.py",
            f"{_ROLES}/verify/machine.py",
            f"{_ROLES}/verify/pass_sharing.py",
        ),
        (
            "tests/nodes/test_fair_share.py",
            "tests/nodes/test_lookahead.py",
            "tests/nodes/test_waiting_passes.py",
            "tests/sim/test_pass_sharing.py",
            "tests/sim/test_plans.py",
            *_NODES,
            *_WHOLE,
        ),
    ),
    "recovery": Area(
        (
            "asyncspec/actor/silence.py",
            "asyncspec/actor/watchdog.py",
            f"{_ROLES}/draft/lifecycle.py",
            f"{_ROLES}/draft/recovery.py",
            f"{_ROLES}/verify/lifecycle.py",
        ),
        (
            "tests/actor/test_silence.py",
            "tests/actor/test_watchdog.py",
            "tests/nodes/test_pending_releases.py",
            "tests/nodes/test_prefix_cache.py",
            "tests/nodes/test_recovery.py",
            "tests/policy/flow/test_memory.py",
            "tests/sim/test_hung_devices.py",
            "tests/sim/test_poison_requests.py",
            *_NODES,
            *_WHOLE,
        ),
    ),
    "source": Area(
        (f"{_ROLES}/draft/drafting.py", f"{_ROLES}/source.py"),
        ("tests/nodes/test_source.py", "tests/nodes/test_lookahead.py", *_NODES, *_WHOLE),
    ),
    "wire": Area(
        tuple(
            f"protocol/asyncspec_protocol/{name}.py"
            for name in ("base", "framing", "ids", "limits", "links", "sessions")
        ),
        (
            "tests/protocol/test_codec.py",
            "tests/protocol/test_framing.py",
            "tests/protocol/test_handshake.py",
            "tests/protocol/test_ids.py",
            *_NODES,
        ),
    ),
}
