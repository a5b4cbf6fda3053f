"""llama.cpp's libraries, by ctypes: models out of virtual files, and contexts to compute in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.plugins.llama.cut import VirtualFile
from asyncspec.registry import pip_install

_log: list[str] = []
"""What llama.cpp said last, for errors."""


def import_bindings() -> Any:
    """The module of the low-level bindings. Raises ``UserError`` where it is not installed."""
    try:
        import llama_cpp.llama_cpp as bound
    except ImportError:
        raise missing() from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"llama.cpp cannot be loaded ({error}); install it anew") from None
    return bound


def missing() -> UserError:
    """The error where llama.cpp is not installed, with what installs it."""
    command = pip_install("asyncspec[llama]")
    return UserError(f"llama.cpp is not installed; GGUF files need it: {command}")


def bindings() -> Any:
    """The same, ready for use."""
    bound = import_bindings()
    if not _log:
        _log.append("")
        bound.llama_log_set(_KEPT_LOG, None)
        bound.llama_backend_init()
    return bound


def has_cuda() -> bool:
    """Whether llama.cpp is installed, built for CUDA (or ROCm); starts nothing of it."""
    with contextlib.suppress(UserError):
        return hasattr(import_bindings()._lib, "ggml_backend_cuda_reg")
    return False


def _keep(level: int, text: bytes, data: object) -> None:
    if level == _ERROR and text.strip():
        _log[:] = [*_log[-3:], text.decode(errors="replace").strip()]


_ERROR = 4
_KEPT_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep)


def last_error() -> str:
    """The last thing llama.cpp complained of."""
    return next((text for text in reversed(_log) if text), "it does not say why")


# --- A virtual file as a C stream.

_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SEEK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int
)
_BSD_READ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_BSD_SEEK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)


class _Functions(ctypes.Structure):
    """``cookie_io_functions_t``"""

    _fields_ = [
        ("read", _READ),
        ("write", ctypes.c_void_p),
        ("seek", _SEEK),
        ("close", ctypes.c_void_p),
    ]


class Stream:
    """A C ``FILE`` that reads a virtual one. ``handle``: its address."""

    def __init__(self, file: VirtualFile) -> None:
        self.error: OSError | None = None
        self._file = file
        self._at = 0
        library = ctypes.CDLL(None)
        self._close = library.fclose
        self._close.argtypes = [ctypes.c_void_p]
        if sys.platform == "darwin":
            make = library.funopen
            self._functions: Any = (_BSD_READ(self._read), _BSD_SEEK(self._moved))
            read, seek = self._functions
            arguments: tuple[Any, ...] = (None, read, None, seek, None)
        else:
            make = library.fopencookie
            self._functions = _Functions(_READ(self._read), None, _SEEK(self._seek), None)
            make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Functions]
            arguments = (None, b"rb", self._functions)
        make.restype = ctypes.c_void_p
        self.handle: int = make(*arguments)

    def close(self) -> None:
        """Close the stream and the files behind it."""
        self._close(self.handle)
        self._file.close()

    def _read(self, cookie: object, buffer: int, size: int) -> int:
        try:
            into = memoryview((ctypes.c_char * size).from_address(buffer)).cast("B")
            done = self._file.read(self._at, into)
        except OSError as error:
            self.error = error
            return -1
        self._at += done
        return done

    def _moved(self, cookie: object, offset: int, whence: int) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def _seek(self, cookie: object, offset: Any, whence: int) -> int:
        offset[0] = self._moved(cookie, offset[0], whence)
        return 0


# --- Models.

_MULTIMODAL_ROPES = (8, 40)
"""As in ``enum llama_rope_type``."""


class Model:
    """A model in memory; freed with its last reference."""

    def __init__(self, bound: Any, handle: int) -> None:
        self.bound, self.handle = bound, handle
        self.vocab = bound.llama_model_get_vocab(handle)
        self.width: int = bound.llama_model_n_embd(handle)
        self.vocab_size: int = bound.llama_vocab_n_tokens(self.vocab)
        self.window: int = bound.llama_model_n_swa(handle)
        # Positions of a row for its RoPE: four, of text and of pictures, with a multimodal one.
        self.axes = 4 if bound.llama_model_rope_type(handle) in _MULTIMODAL_ROPES else 1
        # Whether it has layers with a state.
        self.recurrent: bool = bound.llama_model_is_recurrent(
            handle
        ) or bound.llama_model_is_hybrid(handle)

    def __del__(self) -> None:
        self.bound.llama_model_free(self.handle)


def load_model(
    file: VirtualFile,
    name: str,
    *,
    device: int = 0,
    gpu_layers: int = -1,
    repack: bool = False,
    vocab_only: bool = False,
    weights: bool = True,
) -> Model:
    """Load a model of a virtual file. ``name``: for errors. ``device``: the handle of a GPU, and
    ``gpu_layers`` as in ``EngineOptions``; 0: the CPU. ``repack``: keep weights in the layout that
    this CPU multiplies fastest. ``weights``: read them. Raises ``CheckpointError``."""
    bound = bindings()
    parameters = bound.llama_model_default_params()
    parameters.load_mode = 0  # neither mapped nor locked: the file is nowhere
    devices = (ctypes.c_void_p * 2)(device or None, None)
    parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
    parameters.n_gpu_layers = gpu_layers if device else 0
    parameters.use_extra_bufts = repack
    parameters.vocab_only = vocab_only
    parameters.no_alloc = not weights
    stream = Stream(file)
    try:
        handle = bound.llama_model_load_from_file_ptr(stream.handle, parameters)
    finally:
        stream.close()
    if stream.error is not None:
        raise CheckpointError(f"{name} cannot be read ({stream.error})")
    if not handle:
        raise CheckpointError(f"llama.cpp cannot load {name}: {last_error()}")
    model = Model(bound, handle)
    if not vocab_only and (
        not bound.llama_model_has_decoder(handle) or bound.llama_model_is_diffusion(handle)
    ):
        raise CheckpointError(f"{name}: a diffusion model does not continue text; use another")
    return model


def threads() -> int:
    """Threads that share a product (``asyncspec.backend.threads``)."""
    setting = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]
    return int(setting) if setting.isdigit() and int(setting) else 1
