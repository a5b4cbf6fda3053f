"""Whether a model's body may be lean: where its result has the family's bits.

The family's own code runs once over a few rows of noise, and tells what it asks of the tree
(scaling, window, cap); then the lean body does. A release of transformers that computes something
else keeps its own code, and takes longer. One whose own code does not take our arguments, or
attends without our tree, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.lean.body import LeanBody
from asyncspec.errors import CheckpointError, first_line


class Listening(Tree):
    """Instead of attention: remembers what layers give it, and answers with the queries."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[Asked] = []
        self.heard: list[torch.Tensor] = []

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``."""
        self.asked.append(asked)
        self.heard += (query, key, value)
        return query.transpose(0, 1)

    def same(self, other: Listening) -> bool:
        """Whether both were given the same."""
        if self.asked != other.asked or len(self.heard) != len(other.heard):
            return False
        return all(map(torch.equal, self.heard, other.heard))


def make_lean(model: Any, run: Callable[[Tree], torch.Tensor], count: int) -> str:
    """Exchange the body of a transformers causal LM where that changes no bit. Returns why it was
    not exchanged, "" where it was. ``run`` is a pass of ``count`` rows of noise through it, over a
    given tree.

    Raises ``CheckpointError`` where the family's own code cannot run such a pass.
    """
    theirs, ours = Listening(count), Listening(count)
    family = model.model
    try:
        want, result = _results(model, run, theirs)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unknown(model, first_line(error)) from error
    if [asked.layer for asked in theirs.asked] != list(range(len(family.layers))):
        raise _unknown(model, "its layers do not attend through transformers' AttentionInterface")
    try:
        model.model = LeanBody(family, theirs.asked, result)
        got, made = _results(model, run, ours)
        # Scores that are bent to a cap may hide a difference of hidden states.
        hidden = torch.equal(made.last_hidden_state, result.last_hidden_state)
        if hidden and torch.equal(got, want) and ours.same(theirs):
            return ""
        why = "results differ"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = first_line(error)  # its parts are not those we know
    model.model = family
    return why


def _results(
    model: Any, run: Callable[[Tree], torch.Tensor], tree: Tree
) -> tuple[torch.Tensor, Any]:
    """What ``run`` returns, and what the model's body does inside it."""
    results: list[Any] = []
    hook = model.model.register_forward_hook(lambda _body, _inputs, out: results.append(out))
    try:
        return run(tree), *results
    finally:
        hook.remove()


def _unknown(model: Any, why: str) -> CheckpointError:
    import transformers

    return CheckpointError(
        f"{type(model).__name__} of transformers {transformers.__version__} cannot be run in "
        f"stages: {why}; install another version of transformers"
    )
