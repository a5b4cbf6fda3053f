"""llama.cpp as a peer: what is asked of its converter and its servers, on stand-ins for both."""

from __future__ import annotations

import asyncio
import stat
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from tools.bench.peers import llama_cpp
from tools.bench.peers.comparison import Comparison
from tools.bench.peers.peer import Answer
from tools.testbed import host
from tools.testbed.create import Network

pytestmark = pytest.mark.nightly

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


@pytest.mark.nightly
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
