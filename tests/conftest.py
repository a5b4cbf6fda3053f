"""Hypothesis profiles: "derandomised" by default, so that nobody meets what CI cannot; "random" for
``make nightly``, "thorough" for ``make fuzz``, "mutants" for ``tools/mutants``."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from effort import NIGHTLY, QUIET
from forked_workers import pytest_addoption, run_forked

__all__ = ["pytest_addoption"]

# Modules have no garbage, and a million of their objects are no work for later collections: 2 of 10
# seconds of processor time of each worker's collection of tests.
gc.disable()

settings.register_profile(
    "derandomised", deadline=None, suppress_health_check=QUIET, derandomize=True, print_blob=True
)
settings.register_profile(
    "random", deadline=None, suppress_health_check=QUIET, derandomize=False, print_blob=True
)
settings.register_profile("thorough", settings.get_profile("random"), max_examples=5000)
# A failing example is all that is asked for, not the smallest.
settings.register_profile(
    "mutants", settings.get_profile("derandomised"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "derandomised"))


LONGEST = (
    "backend/test_families.py",
    "backend/test_matrix.py",
    "backend/test_memory.py",
    "policy/test_order.py",
    "sim/test_distribution.py",
    "sim/test_fault_schedules.py",
    "sim/test_plans.py",
)
"""Files of some twenty seconds of processor time and more."""


def pytest_configure(config: pytest.Config) -> None:
    """Nodes keep results of self-tests, but not where the user's are, and the user's services in
    the background are not asked. The fork server of all nodes has it from here."""
    folder = tempfile.TemporaryDirectory(prefix="asyncspec-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = folder.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, leave out what is for ``make nightly``, and sort files: the longest, those
    that start processes, those with tensors, the rest. The last ones are short, so that the workers
    of ``make test`` end at about the same time."""
    cases: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    if not NIGHTLY:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    marked = {
        name: {item.path for item in items if item.get_closest_marker(name)}
        for name in ("processes", "torch")
    }
    marked["longest"] = {item.path for item in items if str(item.path).endswith(LONGEST)}
    order = ("longest", "processes", "torch")
    items.sort(key=lambda item: tuple(item.path not in marked[name] for name in order))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on there is garbage. Hypothesis and simulated clusters make so many small objects
    that collections after every 700 of them, Python's threshold, take a tenth of their time."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Forked workers share the fork server of all nodes."""
    from asyncspec_nodes.local.children import FORKS
    from shared_fork_server import SERVERS

    def prepare() -> None:
        if FORKS and any(item.get_closest_marker("processes") for item in session.items):
            SERVERS.shared()

    return run_forked(session, prepare)


def pytest_sessionfinish() -> None:
    """Tests of this process had it, or of those that it has forked."""
    from shared_fork_server import SERVERS

    SERVERS.stop()


def pytest_unconfigure() -> None:
    """llama-cpp-python opens two files when it is imported, and leaves them open."""
    if output := sys.modules.get("llama_cpp._utils"):
        output.outnull_file.close()
        output.errnull_file.close()


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    """Local clusters of this process fork their nodes from one server, and ``--check`` decodes
    here, where threads are the nodes'."""
    from asyncspec_nodes.cli import run
    from asyncspec_nodes.local import cluster
    from shared_fork_server import SERVERS, check_here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ForkServerClient", SERVERS)
        if os.environ.get("OMP_NUM_THREADS") == "1":
            patch.setattr(run, "check", check_here)
        yield
