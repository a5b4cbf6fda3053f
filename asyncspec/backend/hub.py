"""Repositories on the Hugging Face Hub: their names, their download, their errors as sentences."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import (
    AsyncSpecError,
    CheckpointError,
    FetchError,
    UserError,
    first_line,
)
from asyncspec.registry import pip_install

# Second copies of the weights, in the formats of their makers' own programs.
_IGNORED = ("consolidated*", "original/*")
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


class HubName(Struct, frozen=True):
    """A model on the Hub: ID or ID@REVISION (a branch, a tag or a commit)."""

    id: str
    # None: the newest commit of the main branch.
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def check_installed(name: HubName) -> None:
    """Raise ``UserError`` where nothing is installed that could fetch a model."""
    if find_spec("huggingface_hub") is None:
        raise UserError(f"to fetch {name} from the Hub: {pip_install('huggingface-hub')}")


def download(name: HubName, patterns: Sequence[str], *, bars: bool = True) -> Path:
    """The snapshot directory of a Hub repository with at least the files that match ``patterns``,
    fetched where the cache lacks them; a terminal shows progress ``bars``. Without a network the
    files in the cache are used. Raises as ``hub_errors``."""
    check_installed(name)
    with hub_errors(name), _bars(shown=bars):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name.id,
                revision=name.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*_IGNORED],
            )
        )


def is_cached(repository: str) -> bool:
    """Whether a repository's description is in the cache, without a request."""
    if find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import constants, try_to_load_from_cache

    path = try_to_load_from_cache(repository, "config.json", cache_dir=constants.HF_HUB_CACHE)
    return isinstance(path, str)


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Show progress bars on a terminal alone, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    configured = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if configured or are_progress_bars_disabled() or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Translates errors of requests for ``name``: raises ``CheckpointError`` for what its user has
    to mend, ``FetchError`` where the Hub cannot be reached or the transfer fails."""
    import huggingface_hub

    logger = logging.getLogger(huggingface_hub.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # a failure is reported in one line, by us
    try:
        yield
    except AsyncSpecError:
        raise
    except Exception as error:  # a lost connection raises errors of the HTTP library
        raise _translated(name, error) from error
    finally:
        logger.setLevel(level)


def _translated(name: HubName, error: Exception) -> AsyncSpecError:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
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
    absent = errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    if constants.HF_HUB_OFFLINE and isinstance(error, absent):
        return CheckpointError(
            f"not all that is needed of {name} is in the cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE is set; unset it once, or give a local directory"
        )
    cause: BaseException = error
    while cause.__cause__ is not None:  # huggingface_hub wraps errors in advice
        cause = cause.__cause__
    return FetchError(
        f"{name} is not a local directory, and fetching it from {constants.ENDPOINT} failed "
        f"({first_line(cause)}); check the network, or download it elsewhere and give its directory"
    )
