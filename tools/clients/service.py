"""``serve`` with a tiny target of a long context, whose answers are dictated."""

from __future__ import annotations

import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

from asyncspec_nodes.cli import serve
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.local.cluster import LocalCluster
from tools.bench.random_model import save_random
from tools.clients.dictation import DictatingEngine

MODEL = "tiny"
CONTEXT = 131_072
"""Tokens: agents send some forty thousand of the bundled tokenizer's."""


def make_target(folder: Path) -> Path:
    """A target of random weights with the bundled tokenizer and a chat template with tools."""
    import torch
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    )
    save_random(config, folder, torch.float32)
    shutil.copy(BUNDLED_TARGET / "tokenizer.json", folder)
    settings = json.loads((BUNDLED_TARGET / "tokenizer_config.json").read_bytes())
    settings["model_max_length"] = CONTEXT
    settings["chat_template"] = (Path(__file__).parent / "chat.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def main(target: Path, port: int, folder: Path) -> int:
    """Serve ``target`` until a signal; answers edit files in ``folder``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None
    parser = Parser()
    serve.add_arguments(parser)
    words = ["--target", str(target), "--port", str(port), "--stages", "1", "--draft", "ngram"]
    options = serve.read_arguments(parser.parse_args([*words, "--served-model-name", MODEL]))

    async def start(stack: AsyncExitStack, serving: serve.Serving) -> LocalCluster | None:
        cluster = await serve.start_cluster(options, stack, serving)

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        serving.engine = DictatingEngine(serving.engine, encode, end, folder)
        return cluster

    return serve.run_service(options, start)
