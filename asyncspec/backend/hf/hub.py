"""From what a user calls a model to a directory. No torch."""

from __future__ import annotations

from pathlib import Path

from asyncspec.errors import CheckpointError

_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Weights once more, for the programs of those who made the model.
_SECOND_COPIES = ("consolidated*", "original/*")
_PICKLED_FILES = ("pytorch_model*.bin",)


def locate(name: str | Path, *, pickled: bool = False) -> Path:
    """The directory of a local checkpoint, or of one fetched from the Hub.

    ``pickled``: weights as ``pytorch_model*.bin`` are wanted as well (EAGLE heads).

    Raises ``CheckpointError`` where ``name`` is neither a directory nor a model id that can be
    downloaded (or was, when offline).
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or path.exists():
        raise CheckpointError(f"there is no directory {text}; give a checkpoint's directory")
    from huggingface_hub import snapshot_download

    files = [*_HUB_FILES, *(_PICKLED_FILES if pickled else ())]
    try:
        found = snapshot_download(text, allow_patterns=files, ignore_patterns=[*_SECOND_COPIES])
        return Path(found)
    except Exception as error:  # a lost connection raises what its HTTP library does
        why = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{text} is neither a local directory nor a model the Hub gave us ({why}); "
            "download it first and give its directory"
        ) from error
