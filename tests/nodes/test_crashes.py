"""A request that crashes a node is tried twice, wherever in its answer it does; others go on."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from asyncspec_nodes.client.engine import Progress
from asyncspec_nodes.node.supervisor import how_ended
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.messages import Output, Submit, Welcome
from cluster import ask
from laws import check_answer, check_empty
from nodes.test_memory_kills import Starving

WELCOME = Welcome(1, "home", 0, "draft", 2, (0, 0), "float32", "0123", "exact")


class Crashing(Starving):
    """Its last stage crashes where it is to compute a row at the limit or behind."""

    field = "crash"


@pytest.mark.parametrize("others", [0, 1, 3])
def test_in_the_midst_of_its_answer_it_crashes_a_stage_twice(others: int) -> None:
    crashing = Crashing(limit=34)
    bad = ask(9, prompt=tuple(n % 16 for n in range(28)), max_new_tokens=20)
    crashing.run(bad, *map(ask, range(others)))
    finish = crashing.cluster.world.finished[9]
    assert (finish.reason, finish.code, crashing.kills) == ("error", BREAKS, 2)
    assert len(crashing.cluster.world.tokens[9]) > 3
    for number in range(others):
        check_answer(crashing.cluster, ask(number))
    check_empty(crashing.cluster)


def test_a_link_that_is_lost_makes_nobody_a_suspect() -> None:
    crashing = Crashing(limit=1000)
    for number in range(3):
        crashing.cluster.submit(ask(number))
    world = crashing.cluster.world
    world.at(20, world.cut, 1, 2)
    world.at(25, crashing.cluster.connect_all)
    world.run(until=100_000.0)
    for number in range(3):
        check_answer(crashing.cluster, ask(number))


def output(*tokens: int) -> Output:
    return Output(0, tokens, "a" * len(tokens))


def progress() -> Progress:
    return Progress(Submit(0, "a", 9, 0, 0.0, 0, 1.0), ())


def test_a_draft_node_is_crashed_twice() -> None:
    asked = progress()
    asked.begun(WELCOME)
    asked.add(output(1, 2))
    asked.lost(alone=False)
    asked.back(welcome(1))
    assert asked.losses == 1  # a suspect: it is tried alone
    asked.begun(welcome(1))
    asked.lost(alone=True)
    assert asked.losses == 2


def test_nor_does_a_token_between_save_what_was_alone() -> None:
    asked = progress()
    asked.begun(WELCOME)
    for crash in (1, 2):
        asked.add(output(crash))
        asked.lost(alone=True)
        asked.back(welcome(crash))
        assert asked.losses == crash
        asked.begun(welcome(crash))


def test_a_draft_node_that_is_only_killed_has_no_suspects() -> None:
    asked = progress()
    asked.begun(welcome(5))
    asked.add(output(1))
    asked.lost(alone=False)
    asked.back(welcome(5))  # of the process, or of one that no longer says so
    assert asked.losses == 0


def welcome(crash: int) -> Welcome:
    return replace(WELCOME, crash=crash)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (-signal.SIGSEGV, "crashed"),
        (-signal.SIGABRT, "crashed"),
        (1, "crashed"),
        (-signal.SIGTERM, "ended"),
        (-signal.SIGKILL, "ended"),
        (0, "ended"),
        (2, "ended"),
    ],
)
def test_how_a_process_has_ended(code: int, end: str) -> None:
    assert how_ended(code, in_hand=True, out_of_memory=False) == end
    assert how_ended(code, in_hand=False, out_of_memory=False) == "ended"
