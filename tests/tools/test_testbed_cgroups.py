"""Limits by cgroups: what is written where, on trees of plain files and on the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import ClusterError
from tools.testbed import cgroups
from tools.testbed.cgroups import Cgroups


def mounts(root: Path, *kinds: str) -> str:
    """/proc/mounts with these, and what else is always there."""
    lines = ["tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0"]
    for kind in kinds:
        (root / kind).mkdir(parents=True)
        if kind == "unified":
            lines.append(f"cgroup2 {root / kind} cgroup2 rw,relatime 0 0")
        else:
            lines.append(f"cgroup {root / kind} cgroup rw,relatime,{kind} 0 0")
    return "\n".join(lines) + "\n"


def test_version_2_is_taken_where_it_has_the_processor(tmp_path: Path) -> None:
    text = mounts(tmp_path, "unified", "cpu", "memory")
    root = tmp_path / "unified"
    assert cgroups.detect(text) == Cgroups(1, tmp_path / "cpu", tmp_path / "memory")
    (root / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert cgroups.detect(text) == Cgroups(2, root, None)
    (root / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert cgroups.detect(text) == Cgroups(2, root, root)


def test_controllers_of_version_1_may_share_a_mount_or_be_missing(tmp_path: Path) -> None:
    assert cgroups.detect(mounts(tmp_path / "a", "cpu,cpuacct")) == Cgroups(
        1, tmp_path / "a" / "cpu,cpuacct", None
    )
    assert cgroups.detect(mounts(tmp_path / "b", "freezer")) is None
    assert cgroups.detect(mounts(tmp_path / "c")) is None


def test_version_1(tmp_path: Path) -> None:
    found = cgroups.detect(mounts(tmp_path, "cpu", "memory"))
    assert found is not None
    group = cgroups.group(found, "bed-1", 0.5, 256)
    cgroups.create(found, group)
    assert (tmp_path / "cpu/bed-1/cpu.cfs_period_us").read_text() == "10000"
    assert (tmp_path / "cpu/bed-1/cpu.cfs_quota_us").read_text() == "5000"
    assert (tmp_path / "memory/bed-1/memory.limit_in_bytes").read_text() == str(256 << 20)
    assert group.entrances == (
        tmp_path / "cpu/bed-1/cgroup.procs",
        tmp_path / "memory/bed-1/cgroup.procs",
    )


def test_version_2(tmp_path: Path) -> None:
    text, root = mounts(tmp_path, "unified"), tmp_path / "unified"
    (root / "cgroup.controllers").write_text("cpu memory")
    (root / "cgroup.subtree_control").write_text("memory")
    found = cgroups.detect(text)
    assert found is not None
    group = cgroups.group(found, "bed-1", 1.5, 256)
    cgroups.create(found, group)
    assert (root / "cgroup.subtree_control").read_text() == "+cpu"
    assert (root / "bed-1/cpu.max").read_text() == "15000 10000"
    assert (root / "bed-1/memory.max").read_text() == str(256 << 20)
    assert group.entrances == (root / "bed-1/cgroup.procs",)


@given(st.floats(0.01, 1024), st.sampled_from([1, 2]))
def test_a_quota_is_the_share_and_one_the_kernel_takes(cores: float, version: int) -> None:
    group = cgroups.group(Cgroups(version, Path("/c"), Path("/c")), "bed", cores, None)
    values = {path.name: value for path, value in group.writes}
    if version == 2:
        quota, period = map(int, values["cpu.max"].split())
    else:
        quota, period = int(values["cpu.cfs_quota_us"]), int(values["cpu.cfs_period_us"])
    assert quota >= 1000
    assert 1000 <= period <= 1_000_000
    assert abs(quota / period / cores - 1) < 0.001


def test_without_limits_or_controllers_there_is_no_group() -> None:
    nothing = cgroups.Group((), ())
    assert cgroups.group(Cgroups(2, Path("/c"), Path("/c")), "bed", None, None) == nothing
    assert cgroups.group(Cgroups(1, None, Path("/m")), "bed", 1.0, None) == nothing
    assert cgroups.group(Cgroups(1, Path("/c"), None), "bed", None, 64) == nothing


def test_a_tree_that_takes_nothing_is_an_error_in_a_line(tmp_path: Path) -> None:
    gone = Cgroups(1, tmp_path / "gone", None)
    with pytest.raises(ClusterError, match=r"cannot set up the cgroup .*gone/bed"):
        cgroups.create(gone, cgroups.group(gone, "bed", 1.0, None))


def test_removing_twice_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "bed"
    folder.mkdir()
    cgroups.remove([folder])
    cgroups.remove([folder])
    assert not folder.exists()


def test_the_real_tree_takes_limits_and_gives_them_up() -> None:
    found = cgroups.detect(Path("/proc/mounts").read_text())
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and cgroups")
    group = cgroups.group(found, f"asb-test-{os.getpid()}", 0.5, 64)
    assert group.folders
    try:
        cgroups.create(found, group)
        for path, value in group.writes:
            assert path.read_text().split() == value.split()
        assert cgroups.members(group.folders) == set()
    finally:
        cgroups.remove(group.folders)
    assert not any(folder.exists() for folder in group.folders)
