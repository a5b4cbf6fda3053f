"""A model on llama.cpp and its cache, which all sessions share: its contexts, and passes over rows
whose sequences are known."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.core.errors import ClusterError
from asyncspec.plugins.llama.attention import AUTO, OFF, SPARE_ROWS, UNFUSED_ROWS
from asyncspec.plugins.llama.batch import PADDING, Batch
from asyncspec.plugins.llama.branches import Node, Pool, SessionSequences
from asyncspec.plugins.llama.footprint import FIRST_CELLS, SEQUENCES, cells_for
from asyncspec.plugins.llama.library import Model, last_error, threads
from asyncspec.plugins.llama.sequence_states import Saved, pointer, read_states, write_state

Floats = npt.NDArray[np.float32]

S = TypeVar("S", bound=SessionSequences)

_DEAD = 254
"""The sequence of dead rows."""

EXACT_ROWS, FAST_ROWS = 62, 512
"""Most rows of a pass. llama.cpp computes attention in another way from 64 rows on."""


class Settings(Struct, frozen=True):
    """How passes are computed."""

    exact: bool = True
    min_rows: int = 1
    # Types of keys and values, as in ``enum ggml_type``: 1 is F16, 8 is Q8_0.
    kv_type: int = 1
    # As in ``enum llama_flash_attn_type``.
    flash: int = AUTO
    # The GPU's name; "": the CPU.
    device: str = ""
    # Fewest cells of the cache, where the model's RoPE depends on them.
    least_cells: int = FIRST_CELLS
    # Sequences of the cache, without those of dead rows and of padding.
    sequences: int = SEQUENCES

    @property
    def most_rows(self) -> int:
        """Most rows of a pass."""
        if self.exact:
            return EXACT_ROWS
        return UNFUSED_ROWS if self.flash == OFF and not self.device else FAST_ROWS


class Result(Struct, frozen=True):
    """What a pass computed, by row, in the order of its rows."""

    # By the names of captured tensors [n, width].
    captured: dict[str, Floats]
    # Logits of the wanted rows [k, vocab].
    logits: Floats


class CacheEngine(ABC, Generic[S]):
    """A model and its cache. ``last``: the tensor that is the result, nothing after which is
    computed; "": logits are. ``first``: the tensor that is the given hidden states, whatever
    llama.cpp makes of them; "": there is none."""

    def __init__(
        self, model: Model, settings: Settings, last: str = "", *, first: str = ""
    ) -> None:
        self.model, self.settings, self.last, self.first = model, settings, last, first
        self.branches: list[S] = []
        self.pool = Pool(settings.sequences // self._twins)
        self.most_rows = settings.most_rows
        self._wanted: dict[bytes, str] = {}
        self._captured: dict[str, Floats] = {}
        self._replaced = first.encode() or None
        self._listens = bool(last or first)
        bound = self._bound = model.bound
        # Computed of the rows that are outputs only.
        end = bound.llama_model_n_layer(model.handle) - 1
        self._of_outputs = {b"result_norm", f"l_out-{end}".encode()}
        self._batch = Batch(bound, self.most_rows + SPARE_ROWS, model.width, model.axes)
        # A captured tensor on its way out of llama.cpp, and where that is.
        self._tensor_rows = np.empty((self.most_rows + SPARE_ROWS, model.width), np.float32)
        self._tensor_address: int = self._tensor_rows.ctypes.data
        self._no_logits = np.empty((0, model.vocab_size), np.float32)
        self._name = bound._lib.ggml_get_name
        self._name.argtypes, self._name.restype = [ctypes.c_void_p], ctypes.c_char_p
        self._bytes = bound._lib.ggml_nbytes
        self._bytes.argtypes, self._bytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        self._get = bound._lib.ggml_backend_tensor_get
        self._set = bound._lib.ggml_backend_tensor_set
        for copied in (self._get, self._set):
            copied.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._on_tensor = bound.ggml_backend_sched_eval_callback(self._tensor)
        # ``strlen`` of this text says, without Python, whether to stop.
        self._stop = ctypes.create_string_buffer(2)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
        self._stops = bound.ggml_abort_callback(strlen)
        self.cells = 0
        # Cells that were taken since the cache was packed, the last of which is below this. In
        # exact mode none is taken again.
        self._used = 0
        self._context: Any = None
        self._open(settings.least_cells)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._bound.llama_free(self._context)

    @property
    def _bound_sequences(self) -> int:
        return self.settings.sequences + 2

    @property
    def _twins(self) -> int:
        """Sequences that stand for one. With sliding windows llama.cpp takes back what only one
        sequence holds and has left behind, which a prune may need again."""
        return 2 if self.model.window else 1

    def held_bytes(self, cell_bytes: int) -> int:
        """Memory of weights, and of a cache with so many bytes a cell."""
        weights: int = self._bound.llama_model_size(self.model.handle)
        return weights + self.cells * cell_bytes

    def session(self) -> S:
        """The cache of a new session."""
        branches = self._new_session()
        self.branches.append(branches)
        return branches

    @abstractmethod
    def _new_session(self) -> S: ...

    def reserve(self, parent: S) -> None:
        """Have a sequence free for a session that begins like ``parent``, and that in the cache.
        Only where sessions may."""
        raise NotImplementedError

    def park_kept(self, parent: S | None = None) -> None:
        """Move kept prompts that no session goes on from out of the cache, before one is admitted
        that begins like ``parent``. Nothing where no session begins like another one."""

    def unpark(self, branches: S) -> None:
        """Have a session in the cache, its trunk at least."""
        if branches.is_parked:
            self._free_one(branches)
            branches.unpark()
            self.branches.remove(branches)
            self.branches.append(branches)

    @abstractmethod
    def _free_one(self, branches: S) -> None:
        """Have a sequence free for a parked session."""

    def pack(self) -> None:
        """Free the cells of dead rows."""
        self._make_room(0)

    def close(self, branches: S) -> None:
        """A session is over."""
        branches.close()
        self.branches.remove(branches)
        if not self.branches:
            self._close_gaps()

    def stop(self) -> None:
        """End the running pass early; the only method called from another thread."""
        self._stop[0] = b"\1"

    def resume(self) -> None:
        """Nothing is to be stopped any more."""
        self._stop[0] = b"\0"

    # --- The cache, see ``Memory``.

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        first = source * self._twins
        for twin in range(self._twins):
            goal = target * self._twins + twin
            self._bound.llama_memory_seq_cp(self._memory, first, goal, start, end)

    def remove(self, sequence: int, start: int) -> None:
        first = sequence * self._twins
        if self.settings.exact:
            self._bound.llama_memory_seq_cp(self._memory, first, _DEAD, start, -1)
        for twin in range(self._twins):
            self._bound.llama_memory_seq_rm(self._memory, first + twin, start, -1)

    def save(self, sequence: int) -> tuple[int, Saved]:
        bound, first = self._bound, sequence * self._twins
        window = self.model.window if self._twins > 1 else 0
        states = read_states(bound, self._context, first, window)
        return bound.llama_memory_seq_pos_max(self._memory, first) + 1, states

    def restore(self, sequence: int, saved: tuple[int, Saved]) -> None:
        cells, states = saved
        if cells > self.cells - (self._used if self.settings.exact else self._live()):
            self._make_room(cells)
        sequences = range(sequence * self._twins, (sequence + 1) * self._twins)
        for state in states:
            if not write_state(self._bound, self._context, state, sequences):
                self._make_room(cells)
                if not write_state(self._bound, self._context, state, sequences):
                    raise _failure("fill its cache again")
        self._used += cells

    def _live(self) -> int:
        return sum(branches.size for branches in self.branches)

    def _open(self, cells: int) -> None:
        bound, settings = self._bound, self.settings
        parameters = bound.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_ubatch = self.most_rows + SPARE_ROWS
        parameters.n_seq_max = self._bound_sequences
        parameters.n_batch = max(parameters.n_ubatch, parameters.n_seq_max)
        parameters.n_threads = parameters.n_threads_batch = threads()
        parameters.flash_attn_type = settings.flash
        parameters.type_k = parameters.type_v = settings.kv_type
        parameters.kv_unified = parameters.swa_full = parameters.no_perf = True
        parameters.offload_kqv = parameters.op_offload = bool(settings.device)
        if self._listens:
            parameters.cb_eval = self._on_tensor
        parameters.abort_callback = self._stops
        parameters.abort_callback_data = ctypes.cast(self._stop, ctypes.c_void_p)
        self._context = bound.llama_init_from_model(self.model.handle, parameters)
        if not self._context:
            raise _failure(f"make a cache of {cells} tokens")
        self._memory = bound.llama_get_memory(self._context)
        self.cells = bound.llama_n_ctx(self._context)

    def _close_gaps(self) -> None:
        """Pack the cache where at least half of it is free; that is paid for by the rows that were
        computed since."""
        live = self._live()
        if not live:
            self._bound.llama_memory_clear(self._memory, False)
            self._used = 0
        elif 2 * live <= self._used:
            self._make_room(0)

    def _make_room(self, cells: int, attached: int = 0) -> None:
        """Drop dead cells and pack the others in their order; grow where that is not enough for
        ``cells`` more. ``attached``: rows that have sequences and no cells yet."""
        self._bound.llama_memory_seq_rm(self._memory, _DEAD, -1, -1)
        live = self._live() - attached
        wanted = cells_for(live + cells, self.cells)
        self._move(wanted if wanted > self.cells else 0)
        self._used = live

    def _move(self, cells: int) -> None:
        """Write the cache anew, without gaps, in another context with so many cells; 0: in this."""
        bound = self._bound
        state = np.empty(bound.llama_state_get_size(self._context), np.uint8)
        size = bound.llama_state_get_data(self._context, pointer(state), state.size)
        if cells:
            bound.llama_free(self._context)
            self._context = None
            self._open(cells)
        if not bound.llama_state_set_data(self._context, pointer(state), size):
            raise _failure("pack its cache")

    # --- Passes.

    def run(
        self,
        rows: Sequence[tuple[S, Node]],
        wanted: Sequence[bool],
        captures: Collection[str] = (),
    ) -> Result:
        """Compute new rows, each after its parent, and rows above them that are not in the cache.
        ``wanted``: whose logits are the result. ``captures``: tensors that are read out besides
        the last. Raises ``Abandoned`` after ``stop``; rows that are not computed stay in the
        tree."""
        if captures and not self._listens:
            self._listens = True
            self._move(self.cells)
        names = {*captures, self.last} - {""}
        self._wanted = {name.encode(): name for name in names}
        captured: dict[str, list[Floats]] = {name: [] for name in names}
        logits: list[Floats] = []
        count = -(-len(rows) // self.most_rows)
        edges = [len(rows) * i // count for i in range(count + 1)]
        for start, end in pairwise(edges):
            self._some(rows[start:end], wanted[start:end], captured, logits)
        return Result(
            {name: _joined(parts) for name, parts in captured.items()},
            _joined(logits) if logits else self._no_logits,
        )

    @abstractmethod
    def _some(
        self,
        rows: Sequence[tuple[S, Node]],
        wanted: Sequence[bool],
        captured: dict[str, list[Floats]],
        logits: list[Floats],
    ) -> None:
        """Compute no more than ``most_rows``, and append what ``Result`` is made of."""

    def _pass(
        self, rows: Sequence[Node], members: dict[Node, list[int]], wanted: list[bool]
    ) -> None:
        padding = max(0, self.settings.min_rows - len(rows))
        total = len(rows) + padding
        if self.settings.exact and self._used + total > self.cells:
            self._make_room(total, len(rows))
        outputs = self._outputs(wanted + [False] * padding)
        self._batch.fill(rows, members, self._twins, padding, outputs)
        code = self._decode()
        if code == 1:
            self._make_room(total, len(rows))
            code = self._decode()
        if padding:
            self._bound.llama_memory_seq_rm(self._memory, PADDING, -1, -1)
        if code == 2:
            raise Abandoned
        if code:
            raise _failure("compute a pass")
        self._used += len(rows)
        # Places of wanted rows among the outputs.
        places = accumulate(outputs, initial=0)
        self._chosen = [place for place, one in zip(places, wanted, strict=False) if one]

    def _decode(self) -> int:
        self._captured = {}
        code: int = self._bound.llama_decode(self._context, self._batch.batch)
        return code

    def _outputs(self, wanted: list[bool]) -> list[bool]:
        """Rows that go through the last layer as a whole and the head."""
        if not self._of_outputs.isdisjoint(self._wanted):
            return [True] * len(wanted)
        lacking = self.settings.min_rows - sum(wanted) if any(wanted) else 0
        outputs = []
        for row in wanted:
            outputs.append(row or lacking > 0)
            lacking -= not row
        return outputs

    def _logits(self, count: int) -> Floats:
        pointer = self._bound.llama_get_logits(self._context)
        shape = (max(self._chosen) + 1, self.model.vocab_size)
        logits: Floats = np.ctypeslib.as_array(pointer, shape)[self._chosen]
        return logits

    def _tensor(self, tensor: int, ask: bool, data: object) -> bool:
        """Whether a tensor is captured or replaced; then, once it is computed, whether to go on."""
        name: bytes = self._name(tensor)
        if ask:
            return name == self._replaced or name in self._wanted
        size = self._bytes(tensor)
        if name == self._replaced:
            self._set(tensor, ctypes.cast(self._batch.batch.embd, ctypes.c_void_p), 0, size)
            return True
        self._get(tensor, self._tensor_address, 0, size)
        captured_name = self._wanted[name]
        self._captured[captured_name] = self._tensor_rows[: size // (4 * self.model.width)].copy()
        return captured_name != self.last


def _failure(what: str) -> ClusterError:
    return ClusterError(f"llama.cpp cannot {what}: {last_error()}")


def _joined(parts: list[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def with_ancestors(
    rows: Sequence[tuple[S, Node]],
) -> tuple[Sequence[tuple[S, Node]], int]:
    """The rows after those above them that are not in the cache, and the number of the latter."""
    included = {node for _, node in rows}
    again: list[tuple[S, Node]] = []
    for branches, node in rows:
        lost = []
        for above in branches.path(node.parent):
            if above.cached or above in included:
                break
            lost.append((branches, above))
        included.update(node for _, node in lost)
        again += reversed(lost)
    return [*again, *rows], len(again)
