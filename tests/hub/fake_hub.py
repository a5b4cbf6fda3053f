"""The few endpoints of the Hugging Face Hub that huggingface_hub uses to read a model repository.

Each repository is a local directory whose only commit is the branch main. Every request is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct


class Request(Struct, frozen=True):
    """One request for a file, or with an empty name one for the repository."""

    method: str
    file: str
    # Bytes of the body of the response.
    size: int
    ranged: bool = False


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        found = super().get_request()
        self._connections.append(found[0])
        return found

    def server_close(self) -> None:
        super().server_close()
        for connection in self._connections:  # clients keep theirs open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class FakeHub:
    """``with FakeHub({"org/model": directory}) as hub``; ``gated`` repositories refuse."""

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self._repositories = repositories
        self._gated = gated
        self.log: list[Request] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nobody listens any more. Once more is no error."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def downloads(self) -> set[str]:
        """Files of which all bytes were fetched."""
        return {r.file for r in self.log if r.method == "GET" and r.file and not r.ranged}

    def headers(self) -> set[str]:
        """Files of which the beginning was fetched."""
        return {r.file for r in self.log if r.ranged}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.split("/")[1:]]
        if parts[:2] == ["api", "models"]:
            name, what = "/".join(parts[2:4]), parts[4:]
        else:
            name, what = "/".join(parts[:2]), parts[2:]
        directory = self._repositories.get(name)
        if directory is None:
            # As the Hub answers those who have not logged in.
            self._refuse(request, 401, "RepoNotFound" if parts[0] != "api" else "")
        elif name in self._gated and what[0] == "resolve":
            self._refuse(request, 403, "GatedRepo")
        elif what[1] not in ("main", commit_of(directory)):
            self._refuse(request, 404, "RevisionNotFound")
        elif what[0] == "revision":
            self._json(request, {"id": name, "sha": commit_of(directory), "siblings": []})
        elif what[0] == "tree":
            self._json(request, [described(directory, file) for file in files_of(directory)])
        elif not (file := directory.joinpath(*what[2:])).is_file():
            self._refuse(request, 404, "EntryNotFound")
        else:
            self._file(request, directory, file)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.log.append(Request(str(request.command), "", 0))
        request.send_response(status)
        if code:
            request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _json(self, request: BaseHTTPRequestHandler, value: Any) -> None:
        body = json.dumps(value).encode()
        self.log.append(Request(str(request.command), "", len(body)))
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _file(self, request: BaseHTTPRequestHandler, directory: Path, file: Path) -> None:
        content, whole = file.read_bytes(), file.stat().st_size
        asked = request.headers.get("Range")
        first = 0
        if asked is not None:
            first, last = asked.removeprefix("bytes=").split("-")  # type: ignore[assignment]
            first = int(first)
            content = content[first : int(last) + 1 if last else None]
        size = 0 if request.command == "HEAD" else len(content)
        name = str(file.relative_to(directory))
        self.log.append(Request(str(request.command), name, size, asked is not None))
        request.send_response(200 if asked is None else 206)
        request.send_header("X-Repo-Commit", commit_of(directory))
        request.send_header("ETag", f'"{digest(file)}"')
        request.send_header("Accept-Ranges", "bytes")
        if asked is not None:
            end = first + len(content) - 1
            request.send_header("Content-Range", f"bytes {first}-{end}/{whole}")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)


def files_of(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file())


def described(directory: Path, file: Path) -> dict[str, Any]:
    """A file as the tree of a repository has it."""
    size = file.stat().st_size
    entry = {
        "type": "file",
        "path": str(file.relative_to(directory)),
        "size": size,
        "oid": git_digest(file),
    }
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": digest(file), "size": size, "pointerSize": 134}
    return entry


def digest(file: Path) -> str:
    """The ETag: of large files that of their content, of others git's."""
    if file.suffix != ".safetensors":
        return git_digest(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git_digest(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit_of(directory: Path) -> str:
    """Stands for the commit: another one where any file is another one."""
    names = files_of(directory)
    return hashlib.sha1("".join(f"{f.name} {digest(f)}\n" for f in names).encode()).hexdigest()
