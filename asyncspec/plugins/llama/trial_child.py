"""The child process of ``trial``."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from asyncspec.backend.base import EngineOptions, Mode
from asyncspec.core.errors import UserError
from asyncspec.plugins.llama.cache_engine import Settings
from asyncspec.plugins.llama.cut import VirtualFile, cut
from asyncspec.plugins.llama.footprint import sequences
from asyncspec.plugins.llama.library import load_model
from asyncspec.plugins.llama.recurrent import new_engine
from asyncspec.plugins.llama.self_test import run_tests
from asyncspec.plugins.llama.stage import load_engine
from asyncspec.plugins.llama.target import open_target
from asyncspec.plugins.llama.tokenizer import LlamaTokenizer


def main(path: str, first: str, last: str, mode: Mode = "exact", options: str = "") -> None:
    """Load layers [first, last) without their weights, of none the vocabulary; with ``options``,
    compute with them repacked. Raises ``UserError``."""
    target, span = open_target(Path(path)), (int(first), int(last))
    if first == last:
        LlamaTokenizer(target)
    elif options:
        how = msgspec.json.decode(options, type=EngineOptions)
        engine = load_engine(target, *span, mode, how, repack=True)
        result = run_tests(engine, target.info.vocab_size, embeds=span[0] == 0)
        if mode == "exact" and result.guarantee != "bitwise":
            raise UserError("repacked weights round differently in trees")
    else:
        model = load_model(VirtualFile(*cut(target.model, *span)), path, weights=False)
        new_engine(model, Settings(sequences=sequences(target, span)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])  # type: ignore[arg-type]
    except UserError as error:
        sys.exit(str(error))
