"""Grammars over a tokenizer's vocabulary, and the tokens that they allow along a path.

llguidance computes the masks: an Earley parser over a lazy regex lexer, compiled in milliseconds,
whose states roll back. So a tree of drafts needs one matcher a session, which is moved from path
to path; what is allowed after a node is a function of the tokens on its own path alone.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec import Struct

from asyncspec.constraint.bounds import check_size
from asyncspec.constraint.worker import Limits, Worker

Tokens = npt.NDArray[np.int64]

MAX_COMPILED = 64
"""Compiled grammars that are kept, the last ones used."""

MAX_CHARACTERS = 1 << 20
"""Characters of all grammars that are kept. A grammar takes some 40 bytes a character."""

LIMITS = Limits(seconds=0.25, mebibytes=1024)
"""Limits of a grammar's compilation. A hundred definitions take .01 s, 4,000 words .2 s. The last
stage waits for its own as long, less the pass of the prompt."""

MAX_REFUSED = 1024
"""Refused grammars whose reasons are kept: they are not compiled again."""

_LONGEST = 400
"""Characters of a reason."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class Vocabulary(Struct, frozen=True):
    """What a tokenizer's tokens mean."""

    # The bytes of token i; empty: never allowed.
    spelled: Sequence[bytes]
    # Those that are no text, by the names that grammars use, such as ``<|end|>``.
    special: Collection[int]
    # Any of them ends an answer.
    eos: Collection[int]


_EXACT = '%llguidance {"no_forcing": true}\n'
"""Without it text that a grammar forces is allowed in one tokenization only, the tokenizer's."""


class _Engine:
    """A vocabulary as llguidance reads it. It asks for tokens of text only where it forces them
    (``_EXACT``): never."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos)
        self.tokens = list(vocabulary.spelled)
        self.special_token_ids = sorted(vocabulary.special)

    def __call__(self, text: object) -> list[int]:
        return []


class PathMatcher:
    """One session's grammar, at some path below its committed tokens."""

    def __init__(self, matcher: Any, vocab: int, eos: Tokens) -> None:
        """``matcher``: None allows the end of the answer alone."""
        self._matcher = matcher
        self._vocab = vocab
        self._eos = eos
        # Below the committed tokens.
        self._path: list[int] = []

    def commit(self, tokens: Sequence[int]) -> bool:
        """Tokens of the answer that are certain now. False where the grammar does not allow
        them."""
        fits = self._move(tokens)
        del self._path[: len(tokens)]
        return fits

    def allowed(self, path: Sequence[int]) -> Tokens | None:
        """The tokens, ascending, that may follow the committed ones and ``path``; None where the
        grammar does not allow the path itself. Never empty: where nothing else may follow, the
        end-of-text tokens do, also where the grammar has outgrown the parser's limits."""
        if not self._move(path):
            return None
        if self._matcher is None or self._matcher.is_error():
            return self._eos
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        tokens = np.flatnonzero(np.unpackbits(bits, count=self._vocab, bitorder="little"))
        return tokens if len(tokens) else self._eos

    @property
    def complete(self) -> bool:
        """Whether an answer may end with the tokens committed."""
        self._move(())
        return self._matcher is not None and bool(self._matcher.is_accepting())

    def _move(self, path: Sequence[int]) -> bool:
        if self._matcher is None:
            return not path and len(self._eos) > 0
        common = 0
        for token, target in zip(self._path, path, strict=False):
            if token != target:
                break
            common += 1
        if back := len(self._path) - common:
            self._matcher.rollback(back)
        fresh = list(path[common:])
        count = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._path[common:] = fresh[:count]
        return count == len(fresh)


class _LateMatcher(PathMatcher):
    """A matcher whose grammar is still being compiled: its first use waits for it."""

    def __init__(self, future: Future[PathMatcher]) -> None:
        super().__init__(None, 0, np.empty(0, np.int64))
        self._found: Future[PathMatcher] | None = future

    def _move(self, path: Sequence[int]) -> bool:
        if self._found is not None:
            ready, self._found = self._found.result(), None
            self._matcher, self._vocab, self._eos = ready._matcher, ready._vocab, ready._eos
        return super()._move(path)


class _Compiler:
    """Compiles grammars over a vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos:
            raise GrammarError("the target has no end-of-text token to end the answer with")
        self.vocab = len(vocabulary.spelled)
        self.eos: Tokens = np.array(sorted(vocabulary.eos), np.int64)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Engine(vocabulary)), eos_token=self.eos.tolist()
        )

    def compile(self, grammar: str) -> Any:
        """Raises ``GrammarError``."""
        if "%llguidance" in grammar:
            raise GrammarError("%llguidance is not for users; leave the line out")
        matcher = LLMatcher(self._tokenizer, _EXACT + grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what can never match
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return matcher


def validator(vocabulary: bytes) -> Callable[[bytes], bytes]:
    """What a ``Worker`` makes of a ``Vocabulary`` in msgpack: it compiles a grammar, and returns
    why that cannot be done, or nothing."""
    compiler = _Compiler(msgspec.msgpack.decode(vocabulary, type=Vocabulary))

    def problem(grammar: bytes) -> bytes:
        try:
            compiler.compile(grammar.decode())
        except GrammarError as error:
            return str(error).encode()
        return b""

    return problem


class Grammars:
    """The grammars of one vocabulary, each compiled once. ``read``: called for the vocabulary when
    it is first needed. ``bounded``: they are strangers', and compiled here only after a process of
    its own has done so within ``LIMITS``. Thread-safe; a ``PathMatcher`` is not."""

    def __init__(self, read: Callable[[], Vocabulary], *, bounded: bool = False) -> None:
        self._read = read
        # Held for moments, but for the vocabulary's reading.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._found: Vocabulary | None = None
        self._compiler: _Compiler | None = None
        self._worker = None
        if bounded:
            make = f"{__name__}:{validator.__name__}"
            self._worker = Worker(make, lambda: msgspec.msgpack.encode(self._vocabulary()), LIMITS)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        # Characters of all compiled grammars.
        self._characters = 0
        self._refused: OrderedDict[str, str] = OrderedDict()
        # Starts its thread with the first grammar.
        self._behind = ThreadPoolExecutor(1, "grammars")

    def matcher(self, grammar: str) -> PathMatcher:
        """At the start of an answer. Raises ``GrammarError``."""
        compiler, compiled = self._get(grammar)
        return PathMatcher(compiled.deep_copy(), compiler.vocab, compiler.eos)

    def _get(self, grammar: str) -> tuple[_Compiler, Any]:
        """The compiled grammar; a copy of it takes longer than many a compilation."""
        compiler = self._ready()
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
            elif grammar in self._refused:
                raise GrammarError(self._refused[grammar])
        if compiled is None:
            # Without the lock: others' answers go on meanwhile.
            compiled = self._kept(grammar, self._checked(compiler, grammar))
        return compiler, compiled

    def _checked(self, compiler: _Compiler, grammar: str) -> Any:
        """The compiled grammar; it is first compiled where that may fail in any way."""
        try:
            if self._worker is not None:
                check_size(grammar)
                if why := self._worker(grammar.encode()).decode():
                    raise GrammarError(why)
            return compiler.compile(grammar)
        except ValueError as error:
            with self._lock:
                if self._worker is not None and len(grammar) <= MAX_CHARACTERS // MAX_REFUSED:
                    self._refused[grammar] = str(error)
                while len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise GrammarError(str(error)) from None

    def _kept(self, grammar: str, compiled: Any) -> Any:
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._characters += len(grammar)
            while len(self._compiled) > 1 and self._full:
                self._characters -= len(self._compiled.popitem(last=False)[0])
        return compiled

    @property
    def _full(self) -> bool:
        return len(self._compiled) > MAX_COMPILED or self._characters > MAX_CHARACTERS

    def peers_matcher(self, grammar: str) -> PathMatcher:
        """For an answer that a draft node has begun, which has compiled the grammar before: one
        that cannot be compiled here allows the end of the answer alone, so that the draft node
        reports it. Compiled behind this thread's work, until the first use."""
        with self._lock:
            at_once = grammar in self._compiled
        if at_once:
            return self._peers(grammar)
        return _LateMatcher(self._behind.submit(self._peers, grammar))

    def _peers(self, grammar: str) -> PathMatcher:
        try:
            return self.matcher(grammar)
        except GrammarError:
            compiler = self._compiler
            eos = np.empty(0, np.int64) if compiler is None else compiler.eos
            return PathMatcher(None, compiler.vocab if compiler else 0, eos)

    def problem(self, grammar: str) -> str | None:
        """Why a grammar cannot be compiled; None if it can."""
        try:
            self._get(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def close(self) -> None:
        """End the process in which grammars are compiled first."""
        if self._worker is not None:
            self._worker.close()

    def _vocabulary(self) -> Vocabulary:
        if self._found is None:
            self._found = self._read()
        return self._found

    def _ready(self) -> _Compiler:
        with self._reading:
            if self._compiler is None:
                self._compiler = _Compiler(self._vocabulary())
            return self._compiler


_BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], special=(), eos=(256,))


def problem_over_bytes(grammar: str) -> str | None:
    """Why a grammar cannot be compiled over any vocabulary; None where it can over bytes, as it
    then can over most."""
    return Grammars(lambda: _BYTES).problem(grammar)


def _reason(error: str) -> str:
    """In one line; what is behind an empty one is llguidance's own state."""
    lines = error.strip().partition("\n\n")[0].splitlines()
    # Quotations of the grammar, which the user did not write.
    kept = (line for line in lines if not re.match(r"\s*(\d+ \||\^)", line))
    text = re.sub(r"^at \d+\(\d+\): ", "", " ".join(" ".join(kept).split()))
    for mark in (" <state>", " <backtrace>"):
        text = text.partition(mark)[0]
    if text == "NoExtensionBias":
        return "no text fits it"
    return text[:_LONGEST] if text else "llguidance does not say why"
