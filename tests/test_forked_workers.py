"""``pytest --processes``: every test is run and reported, whatever happens to its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FILES = {
    "conftest.py": """
        import forked_workers
        from forked_workers import pytest_addoption

        def pytest_runtestloop(session):
            return forked_workers.run_forked(session, lambda: None)
    """,
    "test_a.py": """
        import os, pytest, signal
        from pathlib import Path

        @pytest.fixture(scope="session")
        def whole():
            yield
            Path("ended").touch()

        @pytest.fixture(scope="module")
        def part():
            yield
            with open("parts", "a") as file:
                file.write("x")

        @pytest.fixture
        def broken():
            yield
            raise ValueError("no end")

        def test_output(capfd, tmp_path, whole):
            os.write(1, b"said")
            assert capfd.readouterr().out == "said"

        def test_fails():
            print("what it said")
            assert [1] == [2]

        def test_killed():
            os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.skip(reason="none")
        def test_skipped():
            pass

        def test_end(broken, whole, part):
            pass
    """,
    "test_b.py": """
        import warnings

        def test_other(tmp_path):
            warnings.warn("beware")

        def test_exits():
            raise SystemExit(0)
    """,
}


ENDS = {
    "test_c.py": """
        def test_fine():
            pass

        def test_interrupted():
            raise KeyboardInterrupt
    """,
    "test_d.py": """
        import os

        def test_fine():
            pass

        def test_ended():
            os._exit(0)
    """,
}
"""The last test of a file ends its process, which then has exit code 0."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write(tmp_path, FILES)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    """Files of indented text."""
    for name, text in files.items():
        (folder / name).write_text("\n".join(line[8:] for line in text.splitlines()))


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of pytest there, with two processes."""
    words = ("-m", "pytest", "--processes", "2", "-p", "no:cacheprovider", *options)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_every_test_is_reported_once(suite: Path) -> None:
    code, output = run(suite, "-v")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    said = Counter(re.findall(r"::(\w+) (PASSED|FAILED|ERROR|SKIPPED)", output))
    assert said == Counter(
        {
            ("test_output", "PASSED"): 1,
            ("test_fails", "FAILED"): 1,
            ("test_killed", "FAILED"): 1,
            ("test_skipped", "SKIPPED"): 1,
            ("test_end", "PASSED"): 1,
            ("test_end", "ERROR"): 1,
            ("test_other", "PASSED"): 1,
            ("test_exits", "FAILED"): 1,
        }
    )
    assert "3 failed, 3 passed, 1 skipped, 1 warning, 1 error" in output
    for text in ("what it said", "no end", "beware", "ended with exit code -9"):
        assert text in output
    assert (suite / "ended").exists()


def test_a_test_that_ends_its_process_fails(tmp_path: Path) -> None:
    write(tmp_path, {"conftest.py": FILES["conftest.py"], **ENDS})
    code, output = run(tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "2 failed, 2 passed" in output
    for name in ("test_c.py::test_interrupted", "test_d.py::test_ended"):
        assert f"FAILED {name} - the process" in output


def test_it_stops_where_pytest_would(suite: Path) -> None:
    code, output = run(suite, "-x", "test_a.py")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 1 passed" in output
    assert (suite / "ended").exists()


@pytest.mark.slow
def test_files_are_repeated(suite: Path) -> None:
    code, output = run(suite, "--repeats", "3")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "9 failed, 9 passed, 3 skipped, 3 warnings, 3 errors" in output
    assert "repeat 1 of 3 (0 failed so far)" in output
    assert (suite / "parts").read_text() == "xxx"
    assert re.search(r"repeat 3 of 3 \([1-9] failed so far\)", output)
    for text in ("test_fails (call):", "test_killed (call):", "test_end (teardown):"):
        assert output.count(text) == 3
        assert output.rindex(text) < output.index("= ERRORS =")
