"""GGUF models in clusters of real processes: ``run``, a cluster file, ``serve``, ``memory``."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from packaging.requirements import Requirement

from asyncspec.backend.base import EngineOptions
from asyncspec.plugins.llama.target import open_target
from asyncspec.plugins.llama.tokenizer import LlamaTokenizer
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.reference.check import CheckRequest, Task, compare_all
from asyncspec_protocol.messages import Submit
from backend.gguf_models import convert, own_greedy
from backend.recurrent_ggufs import save_recurrent
from backend.twelve_requests import PROMPT, check_twelve
from commands import json_output, usage_error
from effort import nightly
from http_process import post, process
from nodes.background import Background, no_process_left
from nodes.test_processes import generate

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.torch]

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "target-Q8_0.gguf"
    return convert(BUNDLED_TARGET, path, "Q8_0", TEMPLATE)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(BUNDLED_DRAFT, tmp_path_factory.mktemp("gguf") / "draft-F16.gguf")


@pytest.fixture(scope="module")
def cluster(target: Path, draft: Path) -> Iterator[Background]:
    """By a cluster file, with options and a name that does not say what the file is."""
    other = target.with_suffix(".bin")
    other.symlink_to(target)
    table = TargetTable(str(other), backend="llama")
    options = EngineOptions(device="cpu", kv_type="q8_0", repack="off")
    with no_process_left():
        background = Background(
            local_config(table, DraftTable(f"{draft}+ngram"), 2, 2, llama=options)
        )
        yield background
        background.close()


@pytest.mark.parametrize("head", [False, nightly(True)])
def test_run_and_check(
    target: Path, draft: Path, head: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"eagle:{BUNDLED_EAGLE}" if head else str(draft)
    argv = ["run", "--target", str(target), "--draft", source, "--stages", "2"]
    argv += ["--no-chat", "--prompt", PROMPT, "--max-new-tokens", "32", "--check", "--json"]
    # The default policy may draft nothing where other programs keep a source waiting.
    argv += ["--policy", "flowspec"]
    got = json_output(capsys, *argv)
    assert got["check"]["equal"]
    assert got["stats"]["hits"] > 0
    prompt = LlamaTokenizer(open_target(target)).encode(PROMPT)
    want, _ = own_greedy(target, prompt, 32)
    assert got["token_ids"] == want


def test_a_cluster_file(cluster: Background, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cluster.ask(capsys, "--prompt", PROMPT, "--max-new-tokens", "16", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["token_ids"]) == 16
    assert cluster.cluster.guarantee == "bitwise"


def test_a_plan_for_users_of_a_gguf_target(
    cluster: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users that draft with a GGUF model, as their passes are measured."""
    # Until it is answered, stages may not be linked yet.
    assert cluster.ask(capsys, "--prompt", PROMPT, "--max-new-tokens", "2")[0] == 0
    host, port = cluster.cluster.address
    saved = tmp_path / "measured.toml"
    where = ["--connect", f"{host}:{port}", "--json", "--save", str(saved)]
    submit = Submit(0, PROMPT, 1500, 0, 0.0, 0, 1.0, ignore_eos=True, policy="dip-sd")

    async def answer(client: Client) -> None:
        async for _ in client.ask(submit):
            pass

    async def main() -> int:
        client = await Client.connect(host, port, cluster.name)
        user = asyncio.create_task(answer(client))
        try:
            while not sum((await client.plan_status()).lengths):
                assert not user.done()
            return await asyncio.to_thread(cli.main, ["plan", "dipsd", *where])
        finally:
            user.cancel()
            await asyncio.gather(user, return_exceptions=True)
            await client.close()

    assert asyncio.run(main()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["users"], found["stages"]) == (1, 2)
    assert found["running"]["forecast"]["greedy"] > 0
    assert json_output(capsys, "plan", "dipsd", str(saved), "--json")["users"] == 1


def test_a_gguf_stage_beside_one_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = convert(BUNDLED_TARGET, tmp_path / "target.gguf")
    table = TargetTable(str(BUNDLED_TARGET), dtype="float32")
    config = local_config(table, DraftTable("ngram"), 3, 2)
    node = tuple(
        replace(one, target=str(file), device="cpu") if one.rank == 2 else one
        for one in config.node
    )
    config = replace(config, node=node)
    background = Background(config)
    try:
        asked = ("--prompt", PROMPT, "--max-new-tokens", "24", "--json")
        code, out, err = background.ask(capsys, *asked)
        assert background.cluster.guarantee == "tolerance"
    finally:
        background.close()
    assert (code, err) == (0, "")
    tokens = json.loads(out)["token_ids"]
    assert tokens == generate(BUNDLED_TARGET, PROMPT, 24)[0]
    task = Task(config, (CheckRequest(Submit(0, PROMPT, 24, 0, 0.0, 0, 1.0), tuple(tokens)),))
    assert [one.equal for one in compare_all(task)] == [True]


@pytest.mark.asyncio
async def test_serve(target: Path, draft: Path) -> None:
    argv = ("serve", "--port", "0", "--stages", "2", "--target", str(target), "--draft", str(draft))
    async with (
        process("asyncspec_nodes.cli.main", *argv) as (child, url),
        aiohttp.ClientSession(url) as web,
    ):
        ask: dict[str, Any] = {"model": "target-Q8_0", "max_tokens": 8, "temperature": 0}
        chat = [{"role": "user", "content": PROMPT}]
        said = await post(web, "/v1/chat/completions", **ask, messages=chat)
        plain = await post(web, "/v1/completions", **ask, prompt=f"user: {PROMPT}\n")
        assert said["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        assert said["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        child.terminate()


@pytest.mark.asyncio
async def test_a_recurrent_model_of_twelve_at_once_and_after_a_kill(tmp_path: Path) -> None:
    path = save_recurrent(tmp_path / "recurrent.gguf", "lfm2", vocabulary=BUNDLED_TARGET)
    await check_twelve(path)


def test_memory(target: Path, draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("memory", "--target", str(target), "--draft", str(draft), "--stages", "2", "--json")
    plain, rounded = json_output(capsys, *argv), json_output(capsys, *argv, "--kv-type", "q8_0")
    for wide, narrow in zip(plain["stages"], rounded["stages"], strict=True):
        assert wide["weights_bytes"] == narrow["weights_bytes"] > 0
        assert narrow["cache_bytes"] == wide["cache_bytes"] * 17 // 32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "cuda"), "device cuda: llama.cpp finds cpu"),
        (("--backend", "hf"), "is not a model of the backend hf"),
        (("--quantize", "int8"), "a GGUF file is quantised as it is"),
        (("--dtype", "bfloat16"), "llama.cpp's stages exchange float32"),
        (("--kv-type", "q8_0", "--flash-attention", "off"), "q8_0 needs flash attention"),
        (("--draft", "eagle:./head"), "there is no directory"),
        (("--draft", "twin"), "twin does not quantise GGUF targets; give a smaller quantisation"),
        (("--stages", "9"), "9 stages are more than the target's 8 layers"),
    ],
)
def test_options_that_do_not_go(
    target: Path, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in usage_error(capsys, "run", "--target", str(target), "--prompt", "a", *options)


def test_options_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("run",), ("memory", "--target", str(BUNDLED_TARGET))):
        said = usage_error(capsys, *command, "--kv-type", "q8_0", "--repack", "off")
        assert "--repack is for GGUF targets" in said


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_a_gguf_cluster_needs_nothing_of_the_extra_for_checkpoints(
    target: Path, tmp_path: Path
) -> None:
    """Neither the command nor its nodes import any of its packages."""
    names = {name.replace("-", "_") for name in extra_requirements("hf")} - {"huggingface_hub"}
    assert {"torch", "transformers", "tokenizers"} <= names
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(names=names))
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "asyncspec_nodes.cli.main", "run", str(target)]
    done = subprocess.run(
        [*command, "--prompt", PROMPT, "-n", "8", "--check", "--json", "--stages", "2"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"]["equal"]


def extra_requirements(extra: str) -> list[str]:
    """Names of what an extra of this project requires."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line).name for line in tables["optional-dependencies"][extra]]
