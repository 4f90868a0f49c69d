"""A small Hugging Face hub on loopback: the endpoints huggingface_hub downloads from, and faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


@dataclass
class Hub:
    """Repositories by name, each a folder. `asked` lists what was requested, `sent` counts bytes of file bodies."""

    url: str
    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    broken: bool = False  # every answer is a 500
    cut_after: dict[str, int] = field(default_factory=dict)  # file -> bytes after which its connection breaks, once
    asked: list[str] = field(default_factory=list)
    sent: int = 0

    def downloads(self) -> list[str]:
        """Files that were sent, in alphabetical order."""
        return sorted({line.split("/resolve/")[1].split("/", 1)[1] for line in self.asked if line.startswith("GET /m")})


@contextmanager
def serve_hub(**repositories: Path) -> Iterator[Hub]:
    """The keyword NAME is served as the repository me/NAME."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None: ...

        def do_GET(self) -> None:
            self.respond(body=True)

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def respond(self, body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            parts = self.path.split("?")[0].strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            name, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
            if hub.broken:
                return self.error(500, "")
            if name not in hub.repositories:
                return self.error(401, "RepoNotFound")
            if api:
                return self.answer(json.dumps(self.listing(hub.repositories[name], rest)).encode())
            if name in hub.gated and self.headers.get("Authorization") != "Bearer letmein":
                return self.error(403, "GatedRepo")
            file = hub.repositories[name] / "/".join(rest[2:])
            return self.file(file, body) if file.is_file() else self.error(404, "EntryNotFound")

        def listing(self, folder: Path, rest: list[str]) -> object:
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [file.relative_to(folder).as_posix() for file in files]
            if rest[:1] == ["tree"]:
                return [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": self.digest(file)}
                    for name, file in zip(names, files, strict=True)
                ]
            return {"id": "me/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}

        def digest(self, file: Path) -> str:
            return hashlib.sha1(file.read_bytes()).hexdigest()

        def file(self, file: Path, body: bool) -> None:
            data, first = file.read_bytes(), 0
            wanted = self.headers.get("Range")
            if wanted:
                first = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if wanted else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{self.digest(file)}"')
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            if not body:
                return
            end = hub.cut_after.pop(file.name, len(data))
            self.wfile.write(data[first:end])
            hub.sent += end - first
            if end < len(data):
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()

        def answer(self, body: bytes, status: int = 200, code: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def error(self, status: int, code: str) -> None:
            self.answer(b'{"error": "no"}', status, code)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", {f"me/{name}": folder for name, folder in repositories.items()})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
