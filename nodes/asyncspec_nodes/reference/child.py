"""The child of ``--check``: the cluster's own stages, one after another, one token at a time."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import NoReturn

import msgspec

from asyncspec.backend.base import StageOptions, StageSpec
from asyncspec.backend.reference import decode
from asyncspec.backend.registry import backend_of
from asyncspec_nodes.cluster.checkpoints import read_template
from asyncspec_nodes.cluster.config import layout
from asyncspec_nodes.node import resources
from asyncspec_nodes.reference.check import Comparison, Question, Task, compare
from asyncspec_nodes.serving.requests import Refusal, ServingConfig, prepare, tokenize
from asyncspec_nodes.serving.text import answer_text


def main() -> NoReturn:
    """Read a ``Task``, write its ``Comparison``s."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    # The nodes' number of threads: another number may round differently.
    resources.set_local_threads(task.config)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(_decode(task)))
    sys.stdout.flush()
    os._exit(0)  # a thread still reads stdin; skips torch's slow teardown


def _end_with_parent() -> None:
    """Exit when the parent closes our stdin."""
    sys.stdin.buffer.read()
    os._exit(1)


def _decode(task: Task) -> list[Comparison]:
    config, target = task.config, task.config.target
    backend = backend_of(target.path)
    model = backend.open(target.path)
    tokenizer = backend.load_tokenizer(model, read_template(target.chat_template))
    # The same layers per stage as in the cluster: the only difference is speculation.
    options = StageOptions(target.dtype, target.mode, target.quantize, config.llama)
    spans = layout(config, model.info.layers)
    stages = [backend.load(StageSpec(model, span, options)) for span in spans]
    rules = ServingConfig(
        context_length=model.info.context_length,
        eos=frozenset(model.info.eos_token_ids),
        policy=config.draft.policy,
    )

    def one(question: Question) -> Comparison:
        request = prepare(question.submit, 0, rules, partial(tokenize, tokenizer))
        assert not isinstance(request, Refusal), request
        text = answer_text(tokenizer, question.submit, request.prompt)
        reference = decode(
            stages,
            request.prompt,
            request.max_new_tokens,
            request.stop_tokens,
            request.sampling,
            until=lambda token: text.push((token,)).stopped,
        )
        return compare(question.token_ids, reference)

    return [one(question) for question in task.questions]


if __name__ == "__main__":
    main()
