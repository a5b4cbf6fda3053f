"""Every option from the environment, and what the command line says of misspelt names."""

from __future__ import annotations

import argparse
import json
import subprocess
from itertools import permutations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import did_you_mean
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec.registry import Registry
from asyncspec_nodes.cli import commands
from asyncspec_nodes.cli.main import main
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import Parser, variable
from asyncspec_nodes.node import cli as node
from asyncspec_nodes.plugins.catalogue import policies_command
from asyncspec_nodes.plugins.chat import chat_command as chat
from commands import usage_error
from tools.bench.docs.cli import parsers

PARSERS = parsers()
OPTIONS = [
    (program, action.option_strings[0])
    for program, parser in PARSERS.items()
    for action in parser._actions
    if variable(action)
]


SAMPLES = {"--window": "64"}
"""Where 1 is too small."""


def sample(action: argparse.Action) -> str:
    """A valid text for an argument."""
    if action.choices:
        return str(next(iter(action.choices)))
    return SAMPLES.get(next(iter(action.option_strings), ""), "1")


def required(parser: argparse.ArgumentParser, but: argparse.Action) -> list[str]:
    """A command line with all that must be there, besides ``but``."""
    words = []
    for action in parser._actions:
        if action is not but and action.required:
            words += [*action.option_strings[:1], sample(action)]
    return words


@pytest.mark.parametrize(("program", "option"), OPTIONS)
def test_a_variable_does_what_its_option_does(program: str, option: str) -> None:
    """Alone as the option does; beside the option it has no say."""
    parser = PARSERS[program]
    assert isinstance(parser, Parser)
    action = next(one for one in parser._actions if option in one.option_strings)
    words, flag, needed = required(parser, action), action.nargs == 0, action.required
    text = "1" if flag else sample(action)
    written = [option] if flag else [option, text]
    parser.environment = {}
    by_option = parser.parse_args([*words, *written])
    parser.environment = {variable(action): text}
    assert parser.parse_args([*words, *written]) == by_option
    assert parser.parse_args(words) == by_option
    action.required = needed
    parser.environment = {variable(action): "0" if flag else "\0no such value"}
    assert parser.parse_args([*words, *written]) == by_option
    assert f"[{variable(action)}]" in parser.format_help().replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(
    "parser", [one for one in PARSERS.values() if isinstance(one, Parser) and one.exclusions]
)
def test_the_command_line_beats_a_variable_that_it_excludes(parser: Parser) -> None:
    actions = {action.dest: action for action in parser._actions if variable(action)}
    needed = [
        word
        for action in parser._actions
        if action.required
        for word in (*action.option_strings[:1], sample(action))
    ]
    sides = [pair for one in parser.exclusions for pair in permutations(one, 2)]
    for side, other in sides:
        for written, hidden in product(side & actions.keys(), other & actions.keys()):
            option, unset = actions[written], actions[hidden]
            words = [*needed, option.option_strings[0]]
            words += [] if option.nargs == 0 else [sample(option)]
            parser.environment = {}
            alone = parser.parse_args(words)
            parser.environment = {variable(unset): "1" if unset.nargs == 0 else sample(unset)}
            assert parser.parse_args(words) == alone, (written, hidden)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("run --prompt hi", {"PROMPT_FILE": "f"}, {"prompt": "hi", "prompt_file": None}),
        (
            "run --connect h:1",
            {"TARGET": "t", "CONFIG": "f"},
            {"target": None, "config": Path("f")},
        ),
        ("run --target t", {"CONNECT": "h:1"}, {"target": "t", "connect": None}),
        ("chat --stages 2", {"URL": "http://h"}, {"url": None}),
        ("chat --url http://h", {"POLICY": "flow", "TARGET": "m"}, {"policy": None, "target": "m"}),
        ("serve --connect h:1", {"POLICY": "flow"}, {"policy": None}),
        ("run --connect h:1", {"POLICY": "flow"}, {"policy": "flow"}),
        ("simulate --coverage 1", {"TOP": "0.5"}, {"coverage": "1", "top": None}),
        ("plan layers --machine m", {"CONFIG": "f"}, {"machine": ["m"], "config": None}),
        ("plan dipsd --connect h:1", {"STAGES": "3"}, {"connect": "h:1", "stages": None}),
        # Together, as before.
        ("run --connect h:1 --target t", {}, {"connect": "h:1", "target": "t"}),
    ],
)
def test_options_that_exclude_one_another(
    words: str,
    variables: dict[str, str],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"ASYNCSPEC_{name}", text)
    found = vars(commands.build_parser().parse_args(words.split()))
    assert {name: found[name] for name in expected} == expected


def test_the_key_of_a_service_is_no_fault_of_a_chat_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCSPEC_API_KEY", "secret")
    remote, local = (
        chat.read_arguments(commands.build_parser().parse_args(["chat", *words])).where
        for words in (["--url", "http://h"], [])
    )
    assert remote == chat.Service("http://h", "secret", "")
    assert isinstance(local, Config)
    line = usage_error(capsys, "chat", "--api-key", "other")
    assert "--api-key goes with --url" in line


KEYS = ("asyncspec chat", "asyncspec serve", "asyncspec up", "asyncspec-node")
"""A service and its client have one variable for the key."""


def test_variables_differ() -> None:
    for program, parser in PARSERS.items():
        names = [name for action in parser._actions if (name := variable(action))]
        assert len(set(names)) == len(names)
        assert ("ASYNCSPEC_API_KEY" in names) == (program in KEYS)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("STAGES", "0", "ASYNCSPEC_STAGES is 0; it must be at least 1"),
        ("STAGES", "many", "ASYNCSPEC_STAGES: invalid int value: 'many'"),
        ("JSON", "maybe", "ASYNCSPEC_JSON is maybe; it must be 1 or 0"),
        ("MODE", "exakt", "did you mean exact?"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str,
    text: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"ASYNCSPEC_{name}", text)
    try:
        code = main(["run", "--prompt", "x"])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCSPEC_STAGES", "")
    assert commands.build_parser().parse_args(["run"]).stages is None


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rnu"], "did you mean run?"),
        (["run", "--stagse", "3"], "did you mean --stages?"),
        (["run", "--quantize", "int44"], "did you mean int4?"),
        (["run", "--policy", "flowspek"], "did you mean flowspec?"),
    ],
)
def test_a_misspelt_name_is_suggested(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert capsys.readouterr().err.strip().endswith(meant)


@given(st.text(max_size=9), st.lists(st.text(min_size=1, max_size=9)))
def test_what_is_suggested_exists(word: str, known: list[str]) -> None:
    hint = did_you_mean(word, known)
    assert not hint or hint.removeprefix("; did you mean ")[:-1] in known


def test_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found] == list(POLICIES)
    for one in found:
        written = ",".join(f"{key}={value}" for key, value in one["parameters"].items())
        assert POLICIES.problem(f"{one['name']}:{written}" if written else one["name"]) is None


def test_policies_of_other_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that cannot be imported, and one without a docstring."""
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    entries = "a-broken = nowhere.at:ALL\nbare = bare_policy:POLICY\n"
    (info / "entry_points.txt").write_text(f"[asyncspec.policies]\n{entries}")
    (tmp_path / "bare_policy.py").write_text(
        "from asyncspec.policy.flow.policy import Flow\n\n\n"
        "class Bare(Flow, frozen=True):\n    pass\n\n\nPOLICY = Bare()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fresh: Registry[Policy] = Registry("asyncspec.policies", "policy", Policy)
    monkeypatch.setattr(policies_command, "POLICIES", fresh)
    for words in (["policies"], ["policies", "--json"]):
        assert main(words) == 0
        output = capsys.readouterr()
        assert "bare" in output.out
        assert "static-tree" in output.out
        assert output.err.startswith("asyncspec: package others 1.0: policy 'a-broken'")


@pytest.mark.parametrize("words", [["--version"], ["run", "--version"]])
def test_versions(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for program in (main, node.main):
        with pytest.raises(SystemExit):
            program(words[-1:] if program is node.main else words)
        assert capsys.readouterr().out.startswith("asyncspec")


def test_completion_for_bash_knows_every_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "script").write_text(script)
    asked = (
        f"source {tmp_path}/script; COMP_WORDS=(asyncspec run --sta); COMP_CWORD=2; "
        "_shtab_asyncspec; echo ${COMPREPLY[@]}"
    )
    reply = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert reply.stdout.split() == ["--stages", "--stage-seconds"]
    for program, option in OPTIONS:
        assert option in script, program
