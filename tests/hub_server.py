"""A small server that speaks the Hugging Face Hub's API, for one repository of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Larger files are "LFS" files there, which come with their SHA-256.
_SMALL = 20_000


class Hub:
    """The repository, and what was asked of it.

    Attributes:
        url: of the server.
        files: name → content.
        sums: name → the SHA-256 that the server claims, where it is not the true one.
        gated: needs the token "secret".
        cut_after: name → the bytes after which the next connection that sends the file ends.
        requests: (method, path, Range header) of each request.
    """

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.url = ""
        self.repo = repo
        self.files = files
        self.sums: dict[str, str] = {}
        self.gated = False
        self.cut_after: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []

    def sha256(self, name: str) -> str:
        return self.sums.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def info(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, content in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if len(content) > _SMALL:
                sibling["lfs"] = {"sha256": self.sha256(name), "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        return {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }

    def downloads(self, name: str) -> list[str | None]:
        """The Range header of each download of a file."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            prefixes = [f"/{hub.repo}/resolve/{revision}/" for revision in ("main", COMMIT, "v1")]
            name = next((path[len(prefix) :] for prefix in prefixes if path.startswith(prefix)), None)
            if hub.gated and self.headers.get("Authorization") != "Bearer secret":
                self.refuse(403, "GatedRepo")
            elif path in {f"/api/models/{hub.repo}{end}" for end in ("", "/revision/main", "/revision/v1")}:
                self.send(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})
            elif name is not None and name in hub.files:
                self.file(name)
            elif f"/{hub.repo}/" in f"{path}/":
                self.refuse(404, "EntryNotFound" if name is not None else "RevisionNotFound")
            else:
                self.refuse(401, "RepoNotFound")

        def file(self, name: str) -> None:
            content = hub.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.sha256(name)}"', "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range")
            if asked is None:
                self.send(200, content, headers)
                return
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send(206, content[start:], headers)

        def refuse(self, status: int, code: str) -> None:
            self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = hub.cut_after.pop(self.path.rpartition("/")[2], None)
            self.wfile.write(content[:cut])
            self.close_connection = cut is not None

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
