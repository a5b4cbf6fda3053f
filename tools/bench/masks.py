"""What constrained decoding costs on a large vocabulary, and whether random answers keep to random
schemas. Logits are noise, so every allowed token is as likely as any other; with ``--decode`` they
are those of a model of random weights on real processes."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from asyncspec.backend.sampling import draw
from asyncspec.constraint.grammar import Grammars, PathMatcher, Vocabulary
from asyncspec.constraint.text import of_schema
from asyncspec.core.sampling import Sampling
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import COUNT, LARGE, Bounds
from tools.bench.options import check_numbers
from tools.bench.processes import run_prompts
from tools.bench.random_model import save_random

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
DECODED = 64
"""Tokens of an answer with ``--decode``."""

MOST = 4000
"""Tokens of an answer; one that is longer is not complete."""


def vocabulary(size: int, seed: int = 0) -> Vocabulary:
    """All bytes, words, and punctuation as JSON has it; the last token ends the text."""
    random, words = Random(seed), {bytes([byte]): None for byte in range(256)}
    while len(words) < size - 1:
        if random.random() < 0.05:
            word = "".join(random.choices('{}[]",:\n 0123456789', k=random.randint(2, 4)))
        else:
            word = random.choice(("", "", " ")) + "".join(
                random.choices(LETTERS, weights=range(26, 0, -1), k=random.randint(2, 9))
            )
        words.setdefault(word.encode())
    return Vocabulary([*words, b"<end>"], {size - 1}, (size - 1,))


def random_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """Whose answers end: strings and lists are bounded."""
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "pattern"]
    kind = random.choice([*kinds, *(["object", "array", "anyOf"] * 3 if depth else [])])
    match kind:
        case "object":
            names = random.sample(
                ["id", "name", "city", "tags", "x y", "\u00e9t\u00e9"], random.randint(0, 4)
            )
            return {
                "type": "object",
                "properties": {name: random_schema(random, depth - 1) for name in names},
                "required": random.sample(names, random.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = random.randint(0, 2)
            items = random_schema(random, depth - 1)
            return {"type": kind, "items": items, "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {kind: [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
        case "enum":
            return {
                kind: random.sample(["a", "b c", 1, 2.5, None, True, '"'], random.randint(1, 4))
            }
        case "string":
            return {"type": kind, "maxLength": random.randint(0, 20)}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d$"])}
        case "integer":
            least = random.randint(-50, 50)
            return {"type": kind, "minimum": least, "maximum": least + random.randint(0, 500)}
        case _:
            return {"type": kind}


def conforms(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether a value is what a ``random_schema`` describes."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "object":
            return (
                isinstance(value, dict)
                and value.keys() <= schema["properties"].keys()
                and all(name in value for name in schema["required"])
                and all(conforms(one, schema["properties"][k]) for k, one in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(conforms(one, schema["items"]) for one in value)
            )
        case "string":
            return (
                isinstance(value, str)
                and len(value) <= schema.get("maxLength", len(value))
                and re.search(schema.get("pattern", ""), value) is not None
            )
        case "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


def answer(matcher: PathMatcher, words: Vocabulary, random: Random) -> bytes | None:
    """A random answer, token by token, with looks at other paths as a tree has them; None where it
    does not end."""
    tokens: list[int] = []
    (end,) = words.eos
    while len(tokens) < MOST:
        allowed = matcher.allowed(())
        assert allowed is not None
        token = int(random.choice(allowed))
        if random.random() < 0.2:  # a branch that is not taken
            first = int(random.choice(allowed))
            matcher.allowed([first, random.randrange(end)])
        if token == end:
            return b"".join(words.spelled[one] for one in tokens)
        tokens.append(token)
        assert matcher.commit([token])
    return None


def check_schemas(count: int, seed: int) -> dict[str, int]:
    """Answers to ``count`` random schemas: valid ones, wrong ones, those that do not end, and
    schemas that no answer fits."""
    words = vocabulary(3000, seed)
    grammars = Grammars(lambda: words)
    found = {"valid": 0, "wrong": 0, "endless": 0, "refused": 0}
    for number in range(count):
        random = Random(f"{seed} {number}")
        schema = random_schema(random)
        if grammars.problem(of_schema(schema)) is not None:
            found["refused"] += 1
            continue
        text = answer(grammars.matcher(of_schema(schema)), words, random)
        if text is None:
            found["endless"] += 1
            continue
        try:
            right = conforms(json.loads(text), schema)
        except ValueError:
            right = False
        found["valid" if right else "wrong"] += 1
        if not right:
            sys.stderr.write(f"{json.dumps(schema)}: {text!r}\n")
    return found


def mask_seconds(size: int, tokens: int) -> dict[str, float]:
    """Seconds on a vocabulary of ``size``: to read it, to compile a grammar, of a row's mask, of a
    row's draw at temperature 1 with and without it."""
    words = vocabulary(size)
    noise = np.random.default_rng(0)
    grammars = Grammars(lambda: words)
    found: dict[str, float] = {}
    start = time.perf_counter()
    grammars.matcher("start: /a/")
    found["vocabulary"] = time.perf_counter() - start
    how = Sampling(temperature=1.0)
    times: dict[str, list[float]] = {"compile": [], "mask": [], "with": [], "without": []}
    random = Random(1)
    while len(times["mask"]) < tokens:
        grammar = of_schema(random_schema(random, 4))
        start = time.perf_counter()
        if grammars.problem(grammar) is not None:
            continue
        times["compile"].append(time.perf_counter() - start)
        matcher = grammars.matcher(grammar)
        for position in range(60):
            logits = noise.standard_normal((1, size), np.float32)
            start = time.perf_counter()
            allowed = matcher.allowed(())
            masked = time.perf_counter()
            (token,) = draw(logits, [position], how, allowed=[allowed])
            drawn = time.perf_counter()
            draw(logits, [position], how)
            plain = time.perf_counter()
            times["mask"].append(masked - start)
            times["with"].append(drawn - start)
            times["without"].append(plain - drawn)
            if token in words.eos:
                break
            matcher.commit([token])
    for name, all_of in times.items():
        found[name] = float(np.mean(all_of))
    found["mask_p99"] = float(np.quantile(times["mask"], 0.99))
    return found


# --- A model of random weights that has the vocabulary.

ENDLESS: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def save_model(size: int, folder: Path, *, width: int, layers: int) -> Path:
    """A checkpoint with a tokenizer of ``size`` tokens, in bfloat16."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    from asyncspec.plugins.hf.checkpoint.tokenizer import BYTE_OF_LETTER

    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    spelled = ["".join(letters[byte] for byte in name) for name in vocabulary(size).spelled[:-1]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=width * 11 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=size - 1,
        bos_token_id=None,
    )
    return save_random(config, folder, torch.bfloat16)


def decode_seconds(size: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a token of plain decoding on two stages, without a grammar, with one that allows
    everything and with a schema, one after another, ``repeats`` times."""
    found: dict[str, list[float]] = {"free": [], "regex": [], "schema": []}
    with TemporaryDirectory() as folder:
        model = save_model(size, Path(folder, "model"), width=896, layers=24)
        schema = Path(folder, "schema.json")
        schema.write_bytes(json.dumps(ENDLESS).encode())
        options = {
            "free": [],
            "regex": ["--regex", "(?s:.*)"],
            "schema": ["--json-schema", str(schema)],
        }
        common = ["--target", str(model), "--draft", "none", "--policy", "autoregressive"]
        common += ["--stages", "2", "--temperature", "1", "--seed", "1", "--no-chat"]
        common += ["--max-new-tokens", str(tokens)]
        for _ in range(repeats):
            for name, more in options.items():
                # The first answer compiles the grammar.
                stats = run_prompts([*common, *more], ["a", "b"])[1]
                found[name].append(stats["decode_seconds"] / (stats["new_tokens"] - 1))
    return found


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--vocabulary", type=int, default=151_936, metavar="N", help="tokens (default: 151936)")
    add("--tokens", type=int, default=400, metavar="N", help="masks to measure (default: 400)")
    add("--schemas", type=int, default=1000, metavar="N", help="random schemas (default: 1000)")
    add("--seed", type=int, default=0, metavar="S", help="of the schemas")
    add("--decode", action="store_true", help="also decode with a model of random weights")
    add("--repeats", type=int, default=3, metavar="R", help="of --decode (default: 3)")
    add("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where an answer is not what its schema describes."""
    check_numbers(
        options,
        vocabulary=Bounds(1024, 1 << 20),
        tokens=COUNT,
        schemas=COUNT,
        seed=Bounds(0, LARGE),
        repeats=COUNT,
    )
    seconds = mask_seconds(options.vocabulary, options.tokens)
    found = check_schemas(options.schemas, options.seed)
    decoding: dict[str, list[float]] = {}
    if options.decode:
        decoding = decode_seconds(options.vocabulary, DECODED, options.repeats)
    if options.json:
        print(json.dumps({"seconds": seconds, "schemas": found, "decoding": decoding}))
    else:
        for name, value in seconds.items():
            print(f"{name:12} {1e3 * value:9.3f} ms")
        print(", ".join(f"{value} {name}" for name, value in found.items()))
        for name, all_of in decoding.items():
            ratio = median(all_of) / median(decoding["free"])
            print(f"{name:12} {1e3 * median(all_of):9.3f} ms a token, {ratio:.3f} of free")
    return 1 if found["wrong"] else 0
