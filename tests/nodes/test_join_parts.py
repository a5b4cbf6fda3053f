"""A target for machines that have none: sparse copies with the bytes of a stage."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from asyncspec.backend.base import FilePart
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.plugins.join import parts
from asyncspec_nodes.plugins.join.parts import Part, PartsSource, merged, routes

SPANS = ((0, 1), (2, 4))


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Its address. Plain HTTP: the certificate is the connection's business."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def fetched(target: Path, span: tuple[int, int], folder: Path, refuse: str = "") -> Path:
    """The copy that a machine fetches."""
    app = web.Application()
    app.add_routes(routes(str(target), lambda request: refuse not in ("secret",)))
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    async with serving(app) as base, aiohttp.ClientSession() as session:
        source = PartsSource(session, base, aiohttp.Fingerprint(bytes(32)))
        found = await source.fetch(span, folder, lambda line: None)
        for name in ("../secret", "secret"):
            async with session.get(f"{base}/files/{name}") as response:
                assert response.status == 404
        return found


@pytest.mark.torch
@pytest.mark.asyncio
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
async def test_a_copy_has_the_fingerprint_and_the_bytes_of_its_layers(
    tmp_path: Path, kind: str, span: tuple[int, int]
) -> None:
    target = BUNDLED_TARGET
    if kind == "gguf":
        pytest.importorskip("gguf")
        from backend.gguf_models import save_random

        target = save_random(tmp_path / "model.gguf", layers=4)
        (tmp_path / "secret").write_text("not the model's")
    backend = backend_of(str(target))
    copy = await fetched(target, span, tmp_path / "copy")
    ours, theirs = backend.open(str(target), tokenizer=False), backend.open(str(copy))
    assert theirs.fingerprint == ours.fingerprint
    for part in backend.stage_files(str(target), span):
        there = copy if kind == "gguf" else copy / part.file.name
        assert _bytes(FilePart(there, part.offset, part.length)) == _bytes(part)
    # Another stage on the same machine adds its own.
    await fetched(target, (0, 4), tmp_path / "copy")
    assert backend.open(str(copy)).fingerprint == ours.fingerprint


@pytest.mark.torch
@pytest.mark.asyncio
async def test_the_last_stage_has_the_tokenizer_which_grammars_need(tmp_path: Path) -> None:
    target, backend = BUNDLED_TARGET, backend_of(str(BUNDLED_TARGET))
    layers = backend.open(str(target)).info.layers
    for span in ((0, 1), (layers - 1, layers)):
        copy = await fetched(target, span, tmp_path / f"copy-{span[0]}")
        files = {file.name for file in copy.iterdir()}
        assert ("tokenizer.json" in files) == (span[1] == layers)
    tokenizers = [backend.load_tokenizer(backend.open(str(p)), None) for p in (target, copy)]
    assert len({tokenizer.encode("Once upon a time") for tokenizer in tokenizers}) == 1


def _bytes(part: FilePart) -> bytes:
    with part.file.open("rb") as stream:
        stream.seek(part.offset)
        return stream.read(part.length)


@pytest.mark.asyncio
async def test_a_copy_goes_on_where_the_connection_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_PAUSE_SECONDS", 0.0)
    content = bytes(range(256)) * 40
    asked: list[str] = []

    async def file(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers["Range"])
        first, last = map(int, asked[-1].removeprefix("bytes=").split("-"))
        response = web.StreamResponse(status=206)
        response.content_length = last + 1 - first
        await response.prepare(request)
        if len(asked) < 3:
            await response.write(content[first : first + 1000])
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(content[first : last + 1])
        return response

    async def listed(request: web.Request) -> web.Response:
        part = {"file": "f", "size": len(content), "offset": 100, "length": 5000}
        return web.json_response({"single": "f", "parts": [part]})

    app = web.Application()
    app.add_routes([web.get("/parts", listed), web.get("/files/f", file)])
    async with serving(app) as base, aiohttp.ClientSession() as session:
        source = PartsSource(session, base, aiohttp.Fingerprint(bytes(32)))
        copy = await source.fetch((0, 1), tmp_path, lambda line: None)
    assert copy.read_bytes()[100:5100] == content[100:5100]
    assert copy.stat().st_size == len(content)
    assert asked == ["bytes=100-5099", "bytes=1100-5099", "bytes=2100-5099"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.asyncio
async def test_a_full_disk_is_said_at_once(small_disk: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be kept in .*No space left on device.*make room"):
        await fetched(BUNDLED_TARGET, (0, 1), small_disk)


@pytest.mark.asyncio
async def test_without_the_secret_nothing_is_sent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --target DIR"):
        await fetched(BUNDLED_TARGET, (0, 1), tmp_path / "copy", refuse="secret")


def test_parts_close_together_are_one(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    some = [FilePart(file, at, length) for at, length in ((900_000, 200_000), (0, 10), (40, 5))]
    assert merged(some) == [Part("f", 1 << 20, 0, 45), Part("f", 1 << 20, 900_000, 148_576)]


@pytest.mark.asyncio
async def test_an_answer_of_another_version_is_no_mistake_of_ours(tmp_path: Path) -> None:
    async def listed(request: web.Request) -> web.Response:
        return web.Response(body=b'{"parts": 1}')

    app = web.Application()
    app.add_routes([web.get("/parts", listed)])
    async with serving(app) as base, aiohttp.ClientSession() as session:
        source = PartsSource(session, base, aiohttp.Fingerprint(bytes(32)))
        with pytest.raises(ClusterError, match="the target cannot be fetched"):
            await source.fetch((0, 1), tmp_path, lambda line: None)
