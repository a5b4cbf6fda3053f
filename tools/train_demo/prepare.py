"""Corpus to token streams, once per work folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from tokenizers import Tokenizer

from .data import KINDS, Document, Split, hold_out
from .errors import UserError
from .exclude import cut, load_prompts, runs_of
from .tokenizer import train_tokenizer
from .tokens import Stream, encode

if TYPE_CHECKING:
    from pathlib import Path

    from .options import Options


@dataclass(frozen=True)
class Prepared:
    """Where `prepare` left what the stages read."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        """The trained tokenizer, as one file."""
        return self.folder / "tokenizer" / "tokenizer.json"

    @property
    def notes(self) -> Path:
        """JSON: fingerprint, and per kind the tokens and the held-out documents."""
        return self.folder / "corpus.json"

    def stream(self, part: str, kind: str) -> Path:
        """Token stream of `part` ("train" or "held_out") and `kind`."""
        return self.folder / f"{part}-{kind}.npz"

    def load(self, part: str) -> dict[str, Stream]:
        """All streams of one part."""
        return {kind: Stream.load(self.stream(part, kind)) for kind in KINDS}


def prepare(options: Options, corpus: dict[str, list[Document]]) -> Prepared:
    """Split, clean and tokenize the corpus, unless this was done for the same settings."""
    done = Prepared(options.work)
    banned = runs_of(load_prompts(options.exclude)) if options.exclude else set()
    fingerprint = _fingerprint(options, corpus, banned)
    if options.fresh and options.work.exists():
        _clear(options.work)
    if done.notes.exists():
        if json.loads(done.notes.read_text())["fingerprint"] != fingerprint:
            raise UserError(
                f"{options.work} holds a run on other texts: give --fresh or another --work"
            )
        return done
    console, began = Console(), time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    splits, cuts = {}, {}
    for kind, documents in corpus.items():
        split = hold_out(documents, options.recipe.held_out_share)
        train = [cut(d, banned) for d in split.train] if banned else split.train
        cuts[kind] = sum(len(d.text) for d in split.train) - sum(len(d.text) for d in train)
        splits[kind] = Split(train, split.held_out)
    if options.dflash:
        tokenizer = Tokenizer.from_file(str(options.dflash / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(splits, options.recipe.vocab, options.seed)
    done.tokenizer.parent.mkdir(exist_ok=True)
    tokenizer.save(str(done.tokenizer))
    notes = {kind: _write(done, kind, splits[kind], tokenizer, cuts[kind]) for kind in KINDS}
    done.notes.write_text(json.dumps({"fingerprint": fingerprint, "kinds": notes}, indent=1))
    console.print(f"corpus  tokenized in {time.monotonic() - began:.0f} s", highlight=False)
    return done


def _write(done: Prepared, kind: str, split: Split, tokenizer: Tokenizer, cut_: int) -> object:
    train, held_out = encode(split.train, tokenizer), encode(split.held_out, tokenizer)
    train.save(done.stream("train", kind))
    held_out.save(done.stream("held_out", kind))
    characters = sum(len(d.text) + 1 for d in split.train)
    return {
        "documents": len(split.train),
        "tokens": len(train.ids),
        "characters_per_token": round(characters / len(train.ids), 3),
        "characters_cut_for_prompts": cut_,
        "held_out_tokens": len(held_out.ids),
        "held_out_documents": len(split.held_out),
        "held_out_names": [d.name for d in split.held_out][:40] if kind != "math" else [],
    }


def _fingerprint(
    options: Options, corpus: dict[str, list[Document]], banned: set[tuple[str, ...]]
) -> str:
    """Names everything the token streams depend on."""
    digest = hashlib.sha256()
    recipe = options.recipe
    settings = (recipe.vocab, recipe.held_out_share, recipe.max_positions, options.seed)
    digest.update(repr((settings, sorted(banned))).encode())
    if options.dflash:
        digest.update((options.dflash / "tokenizer.json").read_bytes())
    for documents in corpus.values():
        for document in documents:
            digest.update(f"{document.name} {len(document.text)}".encode())
    return digest.hexdigest()[:16]


def _clear(folder: Path) -> None:
    """Remove what earlier runs wrote, and nothing a user may have put there."""
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    for pattern in ("*.npz", "*.pt", "*.tmp", "corpus.json"):
        for path in folder.glob(pattern):
            path.unlink()
