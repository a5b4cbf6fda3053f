"""How many threads a node's products get, and what limits of containers leave it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import CPU
from asyncspec.backend.threads import COUNT_VARIABLES
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster import control_groups
from asyncspec_nodes.cluster.config import (
    Config,
    NodeTable,
    PaceTable,
    SourceTable,
    TargetTable,
)
from asyncspec_nodes.node import resources


def groups(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("own", "files", "quotas"),
    [
        ("0::/", {"cgroup.controllers": "cpu"}, []),
        ("0::/", {"cpu.max": "max 100000"}, []),
        # Seen from inside a container.
        ("0::/", {"cpu.max": "150000 100000"}, [1.5]),
        ("0::/../../outside", {"cpu.max": "150000 100000"}, [1.5]),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, [4.0]),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "400000 100000"}, [0.5, 4.0]),
        (
            "3:memory:/m\n2:cpuacct:/\n1:cpu:/a",
            {"cpu/a/cpu.cfs_quota_us": "40000", "cpu/a/cpu.cfs_period_us": "10000"},
            [4.0],
        ),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            [],
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "what"}, []),
    ],
)
def test_quotas(own: str, files: Mapping[str, str], quotas: list[float], tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own + "\n")
    root = groups(tmp_path / "root", files)
    assert list(control_groups.cpu_quotas(tmp_path / "own", root)) == quotas


def test_systems_without_groups(tmp_path: Path) -> None:
    assert list(control_groups.cpu_quotas(tmp_path / "none", tmp_path)) == []
    assert list(control_groups.memory_bounds(tmp_path / "none", tmp_path)) == []


def memory(
    folder: str, limit: str, used: int, cached: int, active: int = 0, high: str = "max"
) -> dict[str, str]:
    """A group's files, of version 1 in the folder "memory"."""
    if folder.startswith("memory"):
        texts = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used)}
        total = "total_"
    else:
        texts = {"memory.max": limit, "memory.high": high, "memory.current": str(used)}
        total = ""
    lines = {"anon": 5, f"{total}inactive_file": cached, f"{total}active_file": active}
    texts["memory.stat"] = "\n".join(f"{name} {count}" for name, count in lines.items())
    return {f"{folder}/{name}": text for name, text in texts.items()}


@pytest.mark.parametrize(
    ("own", "files", "bounds"),
    [
        ("0::/", {"cgroup.controllers": "memory"}, []),
        ("0::/", memory(".", "max", 10, 0), []),
        ("0::/", memory(".", "12000", 5000, 1000), [(12000, 8000)]),
        ("0::/", memory(".", "12000", 5000, 1000, 3001), [(12000, 9500)]),
        # Of systemd's MemoryHigh=, and Kubernetes' MemoryQoS.
        ("0::/", memory(".", "max", 5000, 1000, high="8000"), [(8000, 4000)]),
        ("0::/", memory(".", "12000", 5000, 0, high="8000"), [(12000, 7000), (8000, 3000)]),
        ("0::/../../outside", memory(".", "12000", 12500, 100), [(12000, 0)]),
        (
            "0::/a/b",
            memory("a/b", "900", 100, 0) | memory("a", "1000", 950, 50),
            [(900, 800), (1000, 100)],
        ),
        ("9:cpu:/\n4:memory:/m", memory("memory/m", "800", 300, 200), [(800, 700)]),
        ("4:memory:/m", memory("memory/m", "800", 300, 100, 100), [(800, 650)]),
        # Of the host: the container's own group is the root.
        ("4:memory:/docker/1", memory("memory", "800", 300, 0), [(800, 500)]),
    ],
)
def test_memory_of_containers(
    own: str, files: Mapping[str, str], bounds: list[tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own + "\n")
    root = groups(tmp_path / "root", files)
    assert list(control_groups.memory_bounds(tmp_path / "own", root)) == bounds


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40))),
)
def test_no_more_memory_than_machine_and_groups_have(
    total: int, free: int, bounds: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(total=total, available=free)
        patch.setattr(psutil, "virtual_memory", lambda: found)
        patch.setattr(control_groups, "memory_bounds", lambda: bounds)
        assert control_groups.total_memory() == min([total, *(limit for limit, _ in bounds)])
        left = min([free, *(left for _, left in bounds)])
        assert control_groups.available_memory() == resources.available_bytes() == left
        assert resources.free_memory() == int(resources.MEMORY_SHARE * left)


@pytest.mark.parametrize(
    ("found", "limit", "expected"),
    [((8, 16, 16), 64.0, 8), ((8, 16, 4), 64.0, 2), ((8, 16, 16), 2.5, 2), ((8, 8, 8), 0.4, 1)],
)
def test_cores(
    found: tuple[int, int, int], limit: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, threads, allowed = found
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: threads if logical else whole)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(allowed), raising=False)
    monkeypatch.setattr(resources, "cpu_quotas", lambda: [limit])
    assert resources.cores() == expected


def test_nodes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    nodes = (NodeTable(0, "a", 1), NodeTable(1, "a", 2), NodeTable(2, "b", 1))
    config = Config(TargetTable(path="x"), nodes, source=SourceTable("a", 3))
    shares = [resources.thread_share(config, node.rank, node.host) for node in config.nodes]
    assert shares == [2, 2, 8, 2]
    # Draft nodes that come are in no file; and as many nodes as there are cores have one each.
    assert resources.thread_share(config, 1001, "c") == 8
    assert resources.thread_share(config, 1001, "a") == 2
    monkeypatch.setattr(resources, "cores", lambda: 2)
    assert resources.thread_share(config, 1, "a") == 1


@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.integers(1, 16), st.integers(0, 3)
)
def test_nodes_that_share_a_gpu_take_turns(
    on_gpus: int, gpus: int, on_cpu: int, cores: int, elsewhere: int
) -> None:
    devices = [f"cuda:{number % gpus}" for number in range(on_gpus)] + [CPU] * on_cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "cores", lambda: cores)
        found = resources.shared_processors(devices, 1)
        without = resources.shared_processors([CPU] * on_cpu, 1)
        both = resources.shared_processors(devices, 1, elsewhere)
    assert found == (min(on_gpus, gpus) + min(on_cpu, cores) if len(devices) > 1 else 0)
    assert without == (cores if on_cpu > 1 else 0)
    assert both == (found + elsewhere if found else 0)


@pytest.mark.parametrize(
    ("here", "draft", "expected"),
    [
        # Of eight cores each node has two; on one GPU they take turns, but for a lookup's.
        (("cpu", "cpu", "cpu"), "cpu", 4),
        (("cuda", "cuda", "cuda"), "cuda", 1),
        (("cuda", "cuda", "cuda"), "cpu", 2),
        (("cuda", "cuda:1", "cuda:2"), "cuda", 3),
    ],
)
def test_what_a_machines_nodes_compute_on(
    here: tuple[str, ...], draft: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    nodes = [NodeTable(rank, "a", rank + 1, device=device) for rank, device in enumerate(here)]
    nodes += [NodeTable(3, "b", 1, device="cuda"), NodeTable(4, "a", 9, device="cuda:3")]
    config = Config(TargetTable(path="x"), tuple(nodes), pace={4: PaceTable(1.0)})
    devices = resources.devices_beside(config, 0, draft, lambda wanted: wanted)
    assert resources.shared_processors(devices, 2) == expected


def test_a_device_that_this_process_does_not_see_is_another() -> None:
    """Of a node in a container of its own, or on llama.cpp beside one that is not."""

    def found(wanted: str) -> str:
        if wanted == "vulkan":
            raise UserError("device vulkan: torch finds cpu")
        return wanted

    nodes = tuple(NodeTable(i, "a", i + 1, device=d) for i, d in enumerate(("cpu", "vulkan")))
    config = Config(TargetTable(path="x"), nodes)
    assert resources.devices_beside(config, 0, CPU, found) == [CPU, "vulkan"]


@pytest.mark.parametrize(
    ("said", "asked", "expected"),
    [(None, None, "4"), ("7", None, "7"), (None, 3, "3"), ("7", 3, "3")],
)
def test_threads_are_asked_for_said_or_shared(
    said: str | None, asked: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*COUNT_VARIABLES, "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, said or "")
        if said is None:
            del os.environ[name]
    monkeypatch.setattr(resources, "cores", lambda: 8)
    config = Config(TargetTable(path="x"), (NodeTable(0, "a", 1), NodeTable(1, "a", 2)))
    resources.set_threads(config, 1, "a", asked)
    assert [os.environ[name] for name in COUNT_VARIABLES] == [expected] * len(COUNT_VARIABLES)
