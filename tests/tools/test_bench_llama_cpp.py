"""llama.cpp as a peer: what is asked of its converter and its servers, on stand-ins for both."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_EAGLE, BUNDLED_TARGET
from tools.bench.__main__ import main
from tools.bench.peers import llama_cpp, pace_child
from tools.bench.peers.comparison import POLICIES, Comparison
from tools.bench.peers.measure import start_ours
from tools.bench.peers.peer import Answer
from tools.testbed import host
from tools.testbed.create import Network

LACKING = host.lacking()
namespaces = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

CONVERTER = """
import json, sys
from conversion import base
def main():
    kind = base.TextModel().get_vocab_base_pre(None)
    open(sys.argv[3], "w").write(json.dumps([kind, sys.argv[1], *sys.argv[4:]]))
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("unknown pre-tokenizer")
"""
# Says its own command line, a word a token; not ready when it is asked first. Ends, as the real one
# does, where a worker does not listen yet.
SERVER = """#!{python}
import http.server, json, sys, urllib.request
host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
if "--rpc" in sys.argv:
    for place in sys.argv[sys.argv.index("--rpc") + 1].split(","):
        urllib.request.urlopen("http://" + place)
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 1 else 503)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["ignore_eos"] is True and body["cache_prompt"] is False, body
        self.send_response(200)
        self.end_headers()
        usage = {{"completion_tokens": body["max_tokens"]}}
        for event in ({{"choices": [{{"text": " ".join(sys.argv[1:])}}]}}, {{"usage": usage}}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *words): pass
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""
# Slower to listen than the server to ask.
WORKER = """#!/bin/sh
{python} -c "import asyncio, http.server, json"
exec {python} -m http.server --bind "$2" "$4"
"""
FAILING = """#!{python}
import sys
sys.exit("cannot read the model")
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder that looks like llama.cpp's, built."""
    files = {
        "convert_hf_to_gguf.py": CONVERTER,
        "conversion/base.py": BASE,
        "conversion/__init__.py": "",
        "build/bin/llama-server": SERVER.format(python=sys.executable),
        "build/bin/ggml-rpc-server": WORKER.format(python=sys.executable),
    }
    for name, text in files.items():
        _write(tmp_path / "llama.cpp" / name, text)
    return tmp_path / "llama.cpp"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_the_bundled_models_are_converted_with_the_pretokenizer_they_have(
    sources: Path, tmp_path: Path
) -> None:
    made = llama_cpp.converted(sources, BUNDLED_TARGET, BUNDLED_DRAFT, tmp_path)
    for file, model in ((made.target, BUNDLED_TARGET), (made.draft, BUNDLED_DRAFT)):
        assert json.loads(file.read_text()) == ["smollm", str(model), "--outtype", "f16"]


def test_what_the_converter_does_not_know_is_the_users_to_solve(
    sources: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((BUNDLED_TARGET / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"].reverse()
    shutil.copytree(BUNDLED_TARGET, tmp_path / "other")
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"cannot convert .*other: .*unknown pre-tokenizer"):
        llama_cpp.converted(sources, tmp_path / "other", BUNDLED_DRAFT, tmp_path)


def test_sources_that_are_not_built_are_one_line(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "build/bin/ggml-rpc-server").unlink()
    assert main(["peers", "--llama-cpp", str(sources)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "no build/bin/ggml-rpc-server; build it there" in said


@pytest.mark.parametrize("gpu", [None, "CUDA0"])
def test_a_gpu_takes_the_draft_model_and_no_layers_of_a_pipeline(
    gpu: str | None, tmp_path: Path
) -> None:
    models = llama_cpp.Models(tmp_path / "target.gguf", tmp_path / "draft.gguf")
    for workers in ([], [("localhost", 9), ("localhost", 10)]):
        words = llama_cpp.server_command(
            tmp_path, models, ("localhost", 8), 1, workers, drafts=True, gpu=gpu
        )
        assert ("--n-gpu-layers" in words) == bool(gpu or workers)
        assert words[words.index("--device-draft") + 1] == (gpu or "none")
        if gpu and workers:
            assert words[words.index("--device") + 1] == "RPC0,RPC1"
        else:
            assert "--device" not in words


def _answers(
    sources: Path, folder: Path, network: Network = "loopback", stage_seconds: float = 0.0
) -> dict[str, Answer]:
    """Every kind's answer of five tokens."""

    async def work() -> dict[str, Answer]:
        comparison = Comparison(
            BUNDLED_TARGET,
            BUNDLED_DRAFT,
            None,
            stages=2,
            network=network,
            llama_cpp=sources,
            stage_seconds=stage_seconds,
        )
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            models = llama_cpp.converted(sources, BUNDLED_TARGET, BUNDLED_DRAFT, folder)
            peers = await llama_cpp.start(comparison, models, folder, session, stack)
            return {peer.name: await peer.answer("Once", 5) for peer in peers}

    return asyncio.run(work())


@pytest.mark.processes
@pytest.mark.parametrize("network", [pytest.param("namespaces", marks=namespaces), "loopback"])
def test_every_kind_is_started_as_it_says_and_answers(
    network: Network, sources: Path, tmp_path: Path
) -> None:
    found = _answers(sources, tmp_path, network)
    assert list(found) == [kind.name for kind in llama_cpp.KINDS]
    for name, answer in found.items():
        assert answer.count == 5
        assert ("--model-draft" in answer.text) == ("draft" in name)
        assert ("ngram-simple" in answer.text) == ("lookup" in name)
        assert ("--rpc" in answer.text) == ("pipeline" in name)
        if "pipeline" in name:
            assert "--tensor-split 1,1" in answer.text
    assert "--threads 2" in found["llama.cpp: plain, all devices"].text
    assert "--threads 1" in found["llama.cpp: draft, one device"].text


@pytest.mark.processes
def test_our_policies_have_llama_cpp_as_their_engine(tmp_path: Path) -> None:
    from backend.gguf_models import convert

    target, draft = (
        convert(model, tmp_path / f"{model.name}.gguf") for model in (BUNDLED_TARGET, BUNDLED_DRAFT)
    )

    async def work() -> dict[str, Answer]:
        comparison = Comparison(
            BUNDLED_TARGET,
            BUNDLED_DRAFT,
            None,
            stages=2,
            network="loopback",
            stage_seconds=0.001,
            head=BUNDLED_EAGLE,
        )
        async with AsyncExitStack() as stack:
            peers = await start_ours(comparison, target, draft, [], stack)
            return {peer.name: await peer.answer("Once", 5) for peer in peers}

    found = asyncio.run(work())
    names = [f"ours (llama): {policy}" for policy in POLICIES]
    lookup = ["ours (llama): flow + lookup", "ours (llama): flow, head + lookup"]
    assert list(found) == [*names, *lookup]
    assert len({answer.token_ids for answer in found.values()}) == 1


def test_what_follows_a_graph_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is passed on at once, whatever its size; and the end of the connection."""

    async def work() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def wait(seconds: float) -> None:
            assert seconds == 7.0
            begun.set()
            await over.wait()

        monkeypatch.setattr(asyncio, "sleep", wait)
        connected = asyncio.get_running_loop().create_future()
        behind = await asyncio.start_server(
            lambda *both: connected.set_result(both), "127.0.0.1", 0
        )
        port = behind.sockets[0].getsockname()[1]
        relay = await asyncio.start_server(
            partial(pace_child.relay, "127.0.0.1", port, 7.0), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*relay.sockets[0].getsockname())
        large, graph, last = (
            pace_child.HEADER.pack(command, size) + bytes(size)
            for command, size in ((6, 3_000_000), (pace_child.GRAPHS[0], 5), (8, 0))
        )
        writer.write(large + graph + last)
        worker, answers = await connected
        assert await worker.readexactly(len(large + graph)) == large + graph
        await begun.wait()
        assert not worker.at_eof()
        answers.write(b"done")
        assert await reader.readexactly(4) == b"done"
        over.set()
        assert await worker.readexactly(len(last)) == last
        writer.close()
        assert await worker.read() == b""
        answers.close()
        assert await reader.read() == b""
        for server in (relay, behind):
            server.close()

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.processes
def test_the_stages_of_its_pipelines_keep_a_pace(sources: Path, tmp_path: Path) -> None:
    found = _answers(sources, tmp_path, stage_seconds=0.001)
    assert list(found) == [kind.name for kind in llama_cpp.KINDS]
    # A log for each worker and for what makes it slow.
    workers = {path.name for path in tmp_path.glob("llama.cpp: plain, pipeline-*")}
    names = [f"llama.cpp: plain, pipeline-{device}" for device in (1, 2)]
    assert workers == {f"{name}{kind}.log" for name in names for kind in ("", "-pace")}


@pytest.mark.processes
def test_a_server_that_ends_says_why(sources: Path, tmp_path: Path) -> None:
    _write(sources / "build/bin/llama-server", FAILING.format(python=sys.executable))
    with pytest.raises(ClusterError, match=r"one device does not start \(cannot read the model\)"):
        _answers(sources, tmp_path)
