"""A draft head that learns while the node serves (``[draft] learn``): the learner's process, and
the versions that it brings.

A version is loaded beside the one that drafts and takes over in sessions that begin after that.
Whatever it proposes, the target decides on every token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.backend.base import Backend, LoadedSource, SourceSpec
from asyncspec.backend.learning.helper import LearnerProcess
from asyncspec.backend.learning.messages import Example, Round, Setup
from asyncspec.backend.learning.recorder import Recorder
from asyncspec.backend.learning.versions import number, state_folder, versions
from asyncspec.core.errors import AsyncSpecError, UserError, first_line
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec.source.versions import VersionedSource

MEMORY = 256 << 20
"""Bytes of examples that the learner keeps."""


class HeadLearning:
    """The head of a node.

    Arguments:
        cluster, rank: whose versions these are.
        target: the target's name as its backend opens it.
        log: takes a line for each new version.
    """

    def __init__(self, cluster: str, rank: int, target: str, log: Any) -> None:
        self._whose = f"{cluster} {rank}"
        self._target = target
        self._log = log
        self._process: LearnerProcess | None = None
        self._totals = {"learned_version": 0.0}

    def totals(self) -> Mapping[str, float]:
        """What has been learned, for ``Status.totals``."""
        return self._totals

    def wrap(self, backend: Backend, spec: SourceSpec, loaded: LoadedSource) -> LoadedSource:
        """A loaded head, or its newest version, which learns from now on. Raises ``UserError``
        for a token source that cannot."""
        if loaded.learnable is None or loaded.tensors is None:
            raise UserError(
                f"[draft] learn: {spec.name} cannot learn; take an EAGLE-3 or DFlash head made by "
                "asyncspec train-head (eagle:DIR), or leave learn out"
            )
        learnable = loaded.learnable()
        self._backend, self._spec = backend, spec
        name = f"{self._whose} {spec.target.fingerprint} {learnable.fingerprint}"
        try:
            state = state_folder()
        except RuntimeError:
            raise UserError(
                "[draft] learn: there is no home directory for what is learned; set XDG_STATE_HOME"
            ) from None
        self._folder = state / hashlib.sha256(name.encode()).hexdigest()[:16]
        self._head, source = Path(learnable.folder), loaded.source
        for version in reversed(versions(self._folder)):
            if (newer := self._load(version)) is not None:
                source = newer.source
                self._log.info("drafting with what was learned", folder=str(version))
                break
        self._source = VersionedSource(source, Recorder(loaded.tensors.pack, self._learn))
        setup = Setup(learnable.make, self._target, "", str(self._folder), MEMORY)
        self._process = LearnerProcess(
            lambda: replace(setup, head=str(self._head)), self._report, self._off
        )
        return replace(loaded, source=self._source)

    def in_hand(self, some: bool) -> None:
        """The node has requests, or has none now."""
        if self._process is not None:
            self._process.in_hand(some)

    def close(self) -> None:
        """End the learner's process."""
        if self._process is not None:
            self._process.close()

    def _learn(self, example: Example) -> None:
        if self._process is not None:
            self._process.add(example)

    def _load(self, version: Path) -> LoadedSource | None:
        """A version as a token source; None, and a line of the log, where it cannot be used."""
        try:
            loaded = self._backend.load_source(replace(self._spec, name=f"{EAGLE_PREFIX}{version}"))
        except (AsyncSpecError, OSError) as error:
            self._log.warning("learned head unusable", folder=str(version), why=first_line(error))
            return None
        self._head = version
        self._totals["learned_version"] = float(number(version))
        return loaded

    def _report(self, result: Round) -> None:
        """Take over what a round has brought; on the thread of the learner's process."""
        self._totals |= {
            "learned_answers": float(result.examples),
            "learned_seconds": result.seconds,
        }
        if not result.folder:
            return
        if (newer := self._load(Path(result.folder))) is not None:
            self._source.take_over(newer.source)
            self._totals |= {"learned_before": result.drafting, "learned_after": result.trained}
            self._log.info(
                "the draft head has learned",
                version=number(self._head),
                guessed_in_a_row=f"{result.drafting:.3f} -> {result.trained:.3f}",
                held_out_answers=result.held_out,
                agreement=" ".join(f"{rate:.3f}" for rate in result.agreement),
            )

    def _off(self, code: int) -> None:
        self._log.warning("the learner's process ends again and again; learning is off", code=code)
