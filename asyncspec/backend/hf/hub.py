"""From what a user calls a model to a directory: local paths and Hub ids. No torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from asyncspec.errors import AsyncSpecError, CheckpointError, ClusterError

TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_HUB_FILES = (*TOKENIZER_FILES, "*.safetensors")
# Weights once more, for the programs of those who made the model.
_SECOND_COPIES = ("consolidated*", "original/*")
_PICKLED_FILES = ("pytorch_model*.bin",)
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


class HubName(Struct, frozen=True):
    """A model on the Hub: ID or ID@REVISION (a branch, a tag or a commit)."""

    id: str
    # None: the newest commit of the main branch.
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse(name: str | Path) -> Path | HubName:
    """A local directory, or a name on the Hub. Raises ``CheckpointError`` for what is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    text = str(name)
    model, _, revision = text.partition("@")
    if text.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists():
        raise CheckpointError(f"there is no directory {text}; give a checkpoint's directory")
    return HubName(model, revision or None)


def short_name(name: str) -> str:
    """What users call a model: the last part of its directory's path, or of its id."""
    path = Path(name).expanduser()
    return path.name if path.is_dir() else Path(name.partition("@")[0]).name


def locate(name: str | Path, *, pickled: bool = False) -> Path:
    """The directory of a local checkpoint, or of one fetched from the Hub as a whole.

    ``pickled``: weights as ``pytorch_model*.bin`` are wanted as well (EAGLE heads).

    Raises as ``parse`` and ``download``.
    """
    found = parse(name)
    if isinstance(found, Path):
        return found
    return download(found, (*_HUB_FILES, *(_PICKLED_FILES if pickled else ())))


def download(name: HubName, patterns: Sequence[str], *, bars: bool = True) -> Path:
    """The snapshot directory of a Hub repository with at least the files that match ``patterns``,
    fetched where the cache lacks them; a terminal shows progress ``bars``. Without a network, what
    is in the cache has to do.

    Raises as ``hub_errors``.
    """
    with hub_errors(name), _bars(shown=bars):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name.id,
                revision=name.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*_SECOND_COPIES],
            )
        )


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Inside, huggingface_hub's progress bars are ``shown`` on a terminal, and nowhere else unless
    HF_HUB_DISABLE_PROGRESS_BARS says so."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    said = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled()
    if said or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Inside, the Hub is asked for ``name``. Raises ``CheckpointError`` for what its user has to
    mend, ``ClusterError`` where the Hub cannot be reached or the transfer fails."""
    import huggingface_hub

    logger = logging.getLogger(huggingface_hub.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)  # a failure is one line, and it is ours
    try:
        yield
    except AsyncSpecError:
        raise
    except Exception as error:  # a lost connection raises what its HTTP library does
        raise _explained(name, error) from error
    finally:
        logger.setLevel(before)


def _explained(name: HubName, error: Exception) -> AsyncSpecError:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    offline = constants.HF_HUB_OFFLINE and isinstance(
        error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    )
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{name.id} is gated: accept its terms at {constants.ENDPOINT}/{name.id} and {_LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{name.id} has no revision {name.revision!r}; correct it")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return CheckpointError(
            f"{name.id} is neither a local directory nor a model the Hub shows to you; correct the "
            f"name, or {_LOG_IN} if it is private"
        )
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{name} is neither a local directory nor a Hub id; correct it")
    if offline:
        return CheckpointError(
            f"not all that is needed of {name} is in the cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; unset it once, or give a local directory"
        )
    why = (str(_cause(error)).strip() or type(error).__name__).split("\n")[0]
    return ClusterError(
        f"{name} is not a local directory, and fetching it from {constants.ENDPOINT} failed "
        f"({why}); check the network, or download it elsewhere and give its directory"
    )


def _cause(error: BaseException) -> BaseException:
    """What first went wrong: huggingface_hub wraps it in advice."""
    while (inner := error.__cause__) is not None:
        error = inner
    return error
