"""Prompts of texts to fill in, by each family's tokens."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from asyncspec.backend.infill import INFILL_TOKENS
from asyncspec.plugins.hf.checkpoint.tokenizer import HFTokenizer

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")


def saved(names: tuple[str, ...], *, begins: bool) -> HFTokenizer:
    """A tokenizer of bytes with these tokens, after one that begins texts or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", *names)])
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    return HFTokenizer(fast)


@pytest.mark.parametrize("names", INFILL_TOKENS)
@pytest.mark.parametrize("begins", [False, True])
def test_the_prompt_is_prefix_suffix_and_middle(names: tuple[str, ...], begins: bool) -> None:
    tokenizer = saved(names, begins=begins)
    said = [tokenizer.spell(token).decode() for token in tokenizer.infill("a b", "c")]
    before, between, behind = names
    want = [before, *"a b", between, "c", behind]
    assert said == (["<s>", *want] if begins else want)


def test_a_tokenizer_without_such_tokens() -> None:
    with pytest.raises(ValueError, match="no tokens for filling in; leave suffix out"):
        saved(INFILL_TOKENS[0][:2], begins=True).infill("a", "b")
