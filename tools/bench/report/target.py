"""The target, asked sequentially: the text that every setting must give, and its features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncspec.backend.base import DType
from asyncspec.backend.reference import CHUNK, decode
from asyncspec.core.jobs import Admit, Forward, Release, Row, SamplerOutput
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.tokenizer import load_tokenizer
from asyncspec_protocol.ids import SegmentId, SessionId
from tools.bench.prompts import encoded
from tools.bench.report.cell import Ask

_SESSION = SessionId(-2)


class Target:
    """A checkpoint on one stage, which computes in ``dtype``. Imports torch."""

    def __init__(self, path: str, dtype: DType = "auto") -> None:
        from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
        from asyncspec.plugins.hf.model.stage import load_stage

        self.checkpoint = open_checkpoint(path)
        self.info = self.checkpoint.info
        self._stage = load_stage(self.checkpoint, 0, self.info.layers, dtype=dtype)
        self._tokenizer = load_tokenizer(Path(path))

    def encode(self, ask: Ask) -> tuple[int, ...]:
        """The prompt's tokens, a user's message where there is a template; of a long one the first
        that leave room for the answer."""
        room = max(1, self.info.context_length - ask.tokens)
        return encoded(self._tokenizer, ask.prompt.text)[:room]

    def write(self, ask: Ask) -> tuple[int, ...]:
        """The answer, by the sequential decoder."""
        prompt = self.encode(ask)
        eos = self.info.eos_token_ids
        return tuple(decode([self._stage], prompt, ask.tokens, eos, ask.sampling))

    def features(self, text: Sequence[int], wanted: tuple[int, ...]) -> Any:
        """What a token source reads of a text [n], prompt and answer: a tensor [n, F], by a plain
        pass."""
        import torch

        self._stage.run(Admit(_SESSION, len(text), Sampling(), len(text), wanted))
        try:
            parts = [self._read(text, start) for start in range(0, len(text), CHUNK)]
        finally:
            self._stage.run(Release(_SESSION))
        return torch.cat(parts)

    def _read(self, text: Sequence[int], start: int) -> Any:
        places = range(start, min(start + CHUNK, len(text)))
        rows = tuple(Row(at, at, tuple(range(start, at + 1))) for at in places)
        job = Forward(_SESSION, SegmentId(start), start, rows, tuple(text[start : places.stop]))
        result = self._stage.run(job)
        assert isinstance(result, SamplerOutput)
        return result.features
