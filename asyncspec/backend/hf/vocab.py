"""Whether two checkpoints mean the same by a token id. JSON only, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from asyncspec.errors import CheckpointError


def check_vocab(target: Path, draft: Path) -> None:
    """Raise ``CheckpointError`` where the draft's tokenizer maps tokens to other ids than the
    target's. Normalisation and chat templates may differ: only ids cross between the models."""
    ours, theirs = token_ids(target), token_ids(draft)
    if ours == theirs:
        return
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    raise CheckpointError(
        f"tokenizer mismatch: {draft} and {target} disagree on {len(different)} entries of their "
        f"vocabularies, the first being {different[0][0]!r}; use a draft model of the same family"
    )


def token_ids(directory: Path) -> dict[str, int]:
    """Every token of a checkpoint's ``tokenizer.json`` and its id, added tokens included."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} has no tokenizer.json; save its tokenizer in the fast format"
        )
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: (token, score) in order of id
            ids = {entry[0]: i for i, entry in enumerate(vocab)}
        else:
            ids = dict(vocab)
        ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} is not a tokenizer this program can read") from error
    return ids
