"""Trace files: what was written is read, whatever else is refused in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec.trace.file import TraceWriter, read_trace
from asyncspec.trace.records import Blocked, End, NodeRecord, Record
from asyncspec_nodes.cli import main as cli
from cluster import Cluster, ask
from effort import QUIET
from laws import Shaken

LINES: list[Record] = [
    NodeRecord(0, 1.0, 2.0, "draft", 1, config={"stages": 1}),
    Blocked(0, 1, 1.0, 1.5, 100),
    End(0, 2.0),
]


def written(path: Path, lines: list[Record] = LINES) -> bytes:
    writer = TraceWriter(path, "a title")
    writer.add(lines)
    writer.close()
    return path.read_bytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    cluster = Cluster(Shaken([2, 1]), record=True)
    cluster.submit(ask())
    cluster.world.run()
    lines = list(cluster.trace().lines)
    written(tmp_path / "t", lines)
    trace = read_trace(tmp_path / "t")
    assert list(trace.lines) == lines
    assert trace.header.title == "a title"


def test_a_killed_run_leaves_a_readable_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t")
    for line in LINES:
        writer.add([line])
        assert read_trace(tmp_path / "t").lines[-1] == line
    writer.close()


@given(st.data())
@settings(suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t"
    whole = written(path)
    at = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["cut", "foreign", "bitten"])):
        case "cut":
            path.write_bytes(whole[:at])
        case "foreign":
            path.write_bytes(data.draw(st.binary()))
        case _:
            path.write_bytes(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :])
    try:
        read_trace(path)
    except UserError as error:
        assert str(path) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole: whole[:-5], "was cut off in line 4; give --partial"),
        (lambda whole: b"", "is empty"),
        (lambda whole: b'{"a": 1}\n', "is not a trace"),
        (lambda whole: b"\x7fELF\x00\xff", "is not a trace"),
        (lambda whole: whole.replace(b'"format":1', b'"format":9'), "has trace format 9"),
        (lambda whole: whole.replace(b'"blocked"', b'"blocke"'), "is damaged in line 3"),
        (lambda whole: whole + whole, "is damaged in line 5: a second header"),
        (lambda whole: whole.splitlines(keepends=True)[0], "has a header and no events"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--summary"], ["--replay"]])
def test_the_command_says_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: object,
    says: str,
    flags: list[str],
) -> None:
    path = tmp_path / "t"
    whole = written(path)
    path.write_bytes(spoil(whole))  # type: ignore[operator]
    assert cli.main(["trace", str(path), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_cut_file_can_be_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(written(path)[:-5])
    assert len(read_trace(path, partial=True).lines) == 2


def test_no_file_and_no_place_for_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(UserError, match="cannot write the trace"):
        TraceWriter(tmp_path / "none" / "t")


def test_a_file_is_kept_until_the_first_event_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that was typed wrong costs no recording."""
    path = tmp_path / "t"
    before = written(path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    assert cli.main(["record", "--connect", where, str(path)]) == 1
    assert cli.main(["run", "--connect", where, "--prompt", "a", "--trace", str(path)]) == 1
    assert capsys.readouterr().err.count("Connection refused") == 2
    assert path.read_bytes() == before
    assert written(path, LINES[:1]) != before
    assert list(read_trace(path).lines) == LINES[:1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that takes nothing")
def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--policy", "chain", "--tokens", "8", "--trace", "/dev/full"]
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err == "asyncspec: cannot write the trace /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    "flags", [[], ["-o", "t.html"], ["--perfetto", "t.html"], ["-o", "../one/t.html"]]
)
def test_a_trace_is_not_replaced_by_what_is_made_of_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    whole = written(Path("t.html"))
    assert cli.main(["trace", "t.html", *flags]) == 2
    assert "is the trace itself; give --" in capsys.readouterr().err
    assert Path("t.html").read_bytes() == whole
