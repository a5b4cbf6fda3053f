"""What depends on how a model writes its answers: their parser, and grammars around their parts."""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec_nodes.chat import harmony
from asyncspec_nodes.chat.calls import Tool, after_reasoning, calls_grammar
from asyncspec_nodes.chat.parser import AnswerParser
from asyncspec_nodes.chat.stepwise import Parser
from asyncspec_nodes.serving.syntax.registry import SYNTAXES
from asyncspec_nodes.serving.templates import ChatFacts


def answer_parser(
    facts: ChatFacts, tools: Sequence[Tool], *, parallel: bool, opened: bool
) -> Parser:
    """``parallel``: more than one call counts. ``opened``: the answer begins with reasoning."""
    if facts.syntax == "harmony":
        return harmony.HarmonyParser(tools, parallel=parallel)
    return AnswerParser(facts, tools, parallel=parallel, opened=opened)


def forced_call(facts: ChatFacts, tools: Sequence[Tool], *, parallel: bool, opened: bool) -> str:
    """The grammar of an answer that calls some of ``tools``. An answer in harmony ends with its
    first call."""
    if facts.syntax == "harmony":
        return harmony.call_grammar(tools)
    return in_content(facts, calls_grammar(tools, facts.syntax, parallel=parallel), opened=opened)


def in_content(facts: ChatFacts, grammar: str, *, opened: bool) -> str:
    """A grammar for what the user gets to see; reasoning before it is free."""
    if facts.syntax == "harmony":
        return harmony.in_final(grammar)
    if not opened:
        return grammar
    return after_reasoning(grammar, SYNTAXES[facts.syntax].reasoning[0][1])
