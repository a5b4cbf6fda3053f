"""``asyncspec train-head``: a draft head for a target, trained on the target's own answers."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from msgspec import Struct

from asyncspec.backend.base import Mode, OpenModel, StageSpec
from asyncspec.backend.feature_shards import Notes, Shards
from asyncspec.backend.registry import backend_of, with_backend
from asyncspec.backend.threads import set_thread_count
from asyncspec.backend.trainers import TRAINERS, Progress, Trainer, Training
from asyncspec.core.errors import UserError
from asyncspec_nodes.cli.cluster_options import (
    CONNECTING,
    add_address_arguments,
    add_model_arguments,
    connects,
    leave_to_cluster,
    read_address,
    read_engine_options,
)
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.checkpoints import read_template
from asyncspec_nodes.cluster.config import Config, TargetTable
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.cluster.named_models import target_of
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, given
from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.node.resources import cores
from asyncspec_nodes.plugins.train_head.answers import LocalAnswers
from asyncspec_nodes.plugins.train_head.cluster import ClusterAnswers
from asyncspec_nodes.plugins.train_head.collection import (
    Answers,
    Bounds,
    Reader,
    collect,
    own_prompts,
    read_prompts,
)

REPORT_SECONDS = 10.0

MODE: Mode = "fast"

COMPUTED = ("mode", "dtype", "quantize", "kv_type", "gpu_layers", "flash_attention", "repack")
"""How the target is computed, as a running cluster has decided; ``--device`` is what trains."""

INTERRUPTED = "asyncspec: interrupted; the same command goes on from here\n"

EPOCHS = bounds.Bounds(0.0, 1e6, above=True)
DISK = bounds.Bounds(0.0, 1e6, above=True)
WINDOW = bounds.Bounds(16, bounds.LARGE)
VOCABULARY = bounds.Bounds(0, bounds.LARGE)


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    text = "default with --config: the cluster's"
    add("-m", "--target", metavar="DIR|GGUF|HF_ID|NAME", help=text)
    add(
        *("--data",),
        type=Path,
        nargs="+",
        metavar="FILE",
        help='JSON lines with "prompt", "turns", "messages" or "text", or plain text, for the '
        "target to answer; default: prompts that it writes itself",
    )
    add("--kind", choices=list(TRAINERS), default="eagle3", help="default: eagle3")
    add("--out", type=Path, required=True, metavar="DIR", help="of the head; texts are in training")
    for name, metavar, allowed, default, text in (
        ("--prompts", "N", bounds.COUNT, 1000, "prompts at most (default: 1000)"),
        ("--max-new-tokens", "N", bounds.COUNT, 512, "tokens of an answer (default: 512)"),
        ("--disk-gib", "GIB", DISK, 4.0, "texts and hidden states (default: 4)"),
        ("--sessions", "N", bounds.COUNT, 8, "answers at a time (default: 8)"),
        ("--draft-vocab", "N", VOCABULARY, 8192, "tokens it proposes; 0: all (default: 8192)"),
        ("--window", "N", WINDOW, 512, "tokens of a text that it reads at once (default: 512)"),
        ("--epochs", "N", EPOCHS, 8.0, "passes over the texts at most (default: 8)"),
        ("--minutes", "M", bounds.SECONDS, 0.0, "of training at most; 0: no limit (default)"),
        ("--seed", "S", bounds.SEED, 0, "default: 0"),
        ("--threads", "N", bounds.THREADS, None, "default: OMP_NUM_THREADS, else all cores"),
    ):
        allowed.add_to(parser, name, metavar, text, default=default)
    add_model_arguments(parser, quantize="the target's weights; default: none", mode=MODE)
    add_address_arguments(parser)
    parser.exclude(CONNECTING, COMPUTED)


def run(arguments: argparse.Namespace) -> int:
    """Collect, train, write. Exit code: 1 where it was interrupted."""
    with exit_on_interrupt(INTERRUPTED):
        if arguments.threads or not os.environ.get("OMP_NUM_THREADS"):
            set_thread_count(arguments.threads or cores())
        trainer = TRAINERS[arguments.kind]
        cluster = read_address(arguments) if connects(arguments) else None
        config = None if arguments.config is None else load(arguments.config)
        target = _target(arguments, config)
        backend = backend_of(target)
        if cluster is None:
            # What a cluster computes is fetched here no further than embedding and head.
            backend.check_target(target)
        backend.preload(target)
    work = arguments.out / "training"
    try:
        model = backend.open(target)
        data = _collect(arguments, trainer, _Target(target, model, config, cluster), work)
        with _raised_between_steps() as check:
            progress = _Lines(check)
            training = Training(
                target=model,
                name=backend.model_name(target),
                data=data,
                shards=work / arguments.kind,
                out=arguments.out,
                draft_vocab=arguments.draft_vocab,
                window=arguments.window,
                epochs=arguments.epochs,
                minutes=arguments.minutes,
                seed=arguments.seed,
                device=arguments.device or "auto",
            )
            trained = trainer.train(training, progress.trained)
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        return 1
    rates = " ".join(f"{rate:.2f}" for rate in trained.agreement)
    sys.stdout.write(
        f"{arguments.out}: {trained.leading:.2f} guesses in a row are right; by depth {rates}\n"
        f"asyncspec run --target {arguments.target or target} --draft eagle:{arguments.out}\n"
    )
    return 0


class _Target(Struct, frozen=True):
    """What is drafted for. ``cluster``: the running one that answers; None: this process."""

    name: str
    model: OpenModel
    config: Config | None
    cluster: ClusterAddress | None


def _target(arguments: argparse.Namespace, config: Config | None) -> str:
    """The target's name for its backend. Raises ``UserError``."""
    if connects(arguments):
        leave_to_cluster(arguments, COMPUTED)
    if arguments.target is None and config is not None:
        return config.target.path
    if arguments.target is None:
        raise UserError("which target? give --target, or --config FILE of a running cluster")
    return with_backend(target_of(arguments.target), arguments.backend or "auto")


def _answers(arguments: argparse.Namespace, target: _Target) -> Answers:
    """What answers the prompts. Raises ``UserError``."""
    model, count = target.model, arguments.sessions
    if target.cluster is not None:
        mixed = target.config is not None and target.config.mixed
        name = "" if mixed else model.fingerprint
        return ClusterAnswers(target.cluster, name, count, lambda line: _note(f"asyncspec: {line}"))
    options = read_engine_options(arguments, target.name)
    # Answers need not be bitwise those of a pipeline.
    how = {"mode": MODE, **given(arguments, TargetTable.__struct_fields__[1:])}
    table = TargetTable(target.name, **how)
    spec = StageSpec(model, (0, model.info.layers), table.stage_options(options))
    return LocalAnswers(backend_of(target.name).load(spec), model.info.eos_token_ids, count)


def _collect(arguments: argparse.Namespace, trainer: Trainer, target: _Target, work: Path) -> str:
    """Fill the shards: what the head is trained on, for its card."""
    model, config = target.model, target.config
    backend, info = backend_of(target.name), model.info
    context, template = info.context_length, None
    if config is not None:
        context = config.limits.context_of(context)
        template = read_template(config.target.chat_template)
    work.mkdir(parents=True, exist_ok=True)
    with closing(backend.load_tokenizer(model, template)) as tokenizer:
        answers = _answers(arguments, target)
        reader = Reader(answers, tokenizer, info.eos_token_ids, context)
        report = _Lines(lambda: None).say
        files = arguments.data
        if files is None:
            path = work / "prompts.jsonl"
            files = own_prompts(reader, path, arguments.prompts, arguments.seed, report)
        items = read_prompts(files, arguments.prompts)
        notes = Notes(model.fingerprint, trainer.depths(info.layers), info.hidden_size)
        shards = Shards(work / arguments.kind, notes)
        limits = Bounds(
            arguments.max_new_tokens,
            int(arguments.disk_gib * bounds.GIB),
            arguments.seed,
        )
        if left_out := collect(reader, shards, items, limits, report):
            _note(f"asyncspec: {left_out} prompts are too long or refused, left out")
    if arguments.data is None:
        return f"{len(items)} prompts that the target wrote itself"
    prompts = len({text.prompt for _, text in shards.texts()})
    names = ", ".join(path.name for path in arguments.data)
    return f"{prompts} prompts of {names}"


class _Lines:
    """Progress, a line every few seconds: readable on a terminal and in a log file. ``check`` is
    called each time."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._last = 0.0

    def say(self, line: str) -> None:
        """Print a line where it is time for one."""
        self._check()
        if time.monotonic() - self._last > REPORT_SECONDS:
            self._print(line)

    def trained(self, progress: Progress) -> None:
        """The same of a training; measurements are always printed."""
        minutes = progress.seconds_left / 60
        line = f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}"
        if progress.agreement:
            rates = " ".join(f"{rate:.2f}" for rate in progress.agreement)
            self._print(
                f"{line}, agreement by depth {rates}, {progress.leading:.2f} in a row, "
                f"at most {minutes:.0f} min left"
            )
            self._check()
        else:
            self.say(f"{line}, at most {minutes:.0f} min left")

    def _print(self, line: str) -> None:
        _note(line)
        self._last = time.monotonic()


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def _raised_between_steps() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT is kept for the yielded function, which raises it: what is saved then is a
    whole step. A second one is raised at once."""
    interrupted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, earlier)
