"""Results of self-tests from one start to the next: which are used again, and which are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend import kept_results
from asyncspec.backend.kept_results import KeptResults, kept_by_user, surroundings

Facts = dict[str, object]


class Test:
    """A test that counts how often it is done."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.results = KeptResults(folder, ("msgspec",))
        self.runs = 0

    def __call__(self, facts: Facts | None = None, fits: bool = True) -> int:
        return self.results.get("test", facts or {}, int, self._run, lambda result: fits)

    def _run(self) -> int:
        self.runs += 1
        return self.runs


@pytest.fixture
def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Test:
    monkeypatch.delenv(kept_results.RETEST, raising=False)
    return Test(tmp_path / "results")


def only(test: Test) -> Path:
    (file,) = (test.results._folder or Path()).iterdir()
    return file


def test_a_kept_result_is_used_again(test: Test) -> None:
    assert [test(), test()] == [1, 1]
    again = Test(only(test).parent)
    assert again() == 1
    assert not again.runs


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.data())
def test_results_of_other_facts_are_not_used(facts: Facts, data: st.DataObject) -> None:
    changed = facts | data.draw(st.dictionaries(st.text(), st.integers() | st.text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(kept_results.RETEST, raising=False)
        files: dict[Path, dict[str, object]] = {}
        patch.setattr(kept_results, "_read", lambda file, kind: files.get(file, {}).get("result"))
        patch.setattr(kept_results, "_write", files.__setitem__)
        test = Test(Path("folder"))
        test(facts)
        test(changed)
        assert test.runs == 1 + (changed != facts)


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "GGML_CPU_TILED_MM"]
)
def test_what_chooses_kernels_is_a_fact(
    name: str, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    test()
    monkeypatch.setenv(name, "2")
    assert test() == 2


def test_a_new_build_is_another_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    library = tmp_path / "some_engine" / "lib" / "libengine.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "some_engine" / "__init__.py").touch()

    def build() -> object:
        kept_results._fixed.cache_clear()
        return surroundings(("some_engine",))["builds"]

    library.write_bytes(b"old")
    old = build()
    assert build() == old
    library.write_bytes(b"newer")
    assert build() != old


def test_a_broken_file_is_written_anew(test: Test, caplog: pytest.LogCaptureFixture) -> None:
    test()
    for broken in (b"", b"\xff\xff", b"[]", b'{"result": "text"}', b'{"result": null}', b"{}"):
        only(test).write_bytes(broken)
        runs = test.runs
        assert test() == runs + 1
        assert test() == runs + 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "holds no result of a self-test" in caplog.text


def test_a_result_that_does_not_fit_is_not_used(test: Test) -> None:
    assert [test(), test(fits=False)] == [1, 2]


def test_without_a_folder_to_write_to_each_test_is_done(
    test: Test, caplog: pytest.LogCaptureFixture
) -> None:
    assert test.results._folder is not None
    test.results._folder.write_text("a file")
    assert [test(), test()] == [1, 2]
    assert "are not kept in" in caplog.text


def test_retest_reads_nothing_and_keeps_the_new_result(
    test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    monkeypatch.setenv(kept_results.RETEST, "1")
    assert test() == 2
    monkeypatch.delenv(kept_results.RETEST)
    assert test() == 2


def test_a_failure_is_not_kept(test: Test) -> None:
    def fail() -> int:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        test.results.get("test", {}, int, fail)
    assert test() == 1


def test_the_oldest_results_go(test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MAX_FILES", 3)
    for number in range(5):
        test({"number": number})
    folder = test.results._folder
    assert folder is not None
    kept = [msgspec.json.decode(file.read_bytes())["facts"]["number"] for file in folder.iterdir()]
    assert 4 in kept
    assert len(kept) == 3


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_by_user(("msgspec",)).get("test", {}, int, lambda: 7) == 7
    assert len([*(tmp_path / "asyncspec" / "self-tests").iterdir()]) == 1


@pytest.mark.torch
def test_a_checkpoints_stage_from_kept_results(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.model import stage as module

    monkeypatch.delenv(kept_results.RETEST, raising=False)
    results, checkpoint = KeptResults(tmp_path / "results", ("torch",)), open_checkpoint(tiny())
    tested = module.load_stage(checkpoint, 0, 2, results=results)
    monkeypatch.setattr(module, "run_tests", None)
    kept = module.load_stage(checkpoint, 0, 2, results=results)
    assert (kept.settings, kept.guarantee) == (tested.settings, tested.guarantee)
    for linear, again in zip(tested.shard.linears, kept.shard.linears, strict=True):
        assert linear.min_rows == again.min_rows
    with pytest.raises(TypeError):
        module.load_stage(checkpoint, 0, 1, results=results)
    with pytest.raises(TypeError):
        module.load_stage(checkpoint, 0, 2, quantize="int8", results=results)
