"""A server on loopback that plays the hubs: Hugging Face's API and ModelScope's.

As on Hugging Face, a weight file is a redirect to another place, and only that one knows ranges.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Optional
from urllib.parse import parse_qs, urlsplit

import pytest

CHUNK = 256
"""Of a transfer that is cut, Hugging Face's client keeps whole chunks."""
LARGE = (".safetensors", ".bin", ".gguf")
"""What is stored elsewhere."""


@dataclass(frozen=True)
class Refusal:
    """What a hub answers instead of what it is asked for."""

    status: int
    code: str = ""
    files_only: bool = False


@dataclass
class Repository:
    """The files of a model, and how they are handed out.

    Attributes:
        cuts: file -> after how many bytes each of its next transfers ends.
        refusal: of everything, or of the files alone, as for a gated model.
        moved_to: the new name of a model that was renamed.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    refusal: Optional[Refusal] = None
    moved_to: str = ""

    @property
    def sha(self) -> str:
        """Of the commit."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class Hub:
    """The server, while its `with` block runs.

    Attributes:
        cache: where its clients keep what they have.
        repositories: by owner/name.
        transfers: (file, first byte) of every file that was asked for.
        requests: every path.
        is_down: connections are closed without an answer.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.clear()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}/storage"

    def clear(self) -> None:
        """As in the beginning: no model, and nothing in the caches of the clients."""
        self.repositories: dict[str, Repository] = defaultdict(Repository)
        self.transfers: list[tuple[str, int]] = []
        self.requests: list[str] = []
        self.is_down = False
        shutil.rmtree(self.cache, ignore_errors=True)

    def add(self, name: str, folder: Path) -> Repository:
        """A model with the files of a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.repositories[name] = Repository(files)
        return self.repositories[name]

    def transferred(self) -> set[str]:
        """The files of which anything was asked for."""
        return {file for file, _ in self.transfers}

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def only_hub(cache: Path) -> Iterator[Hub]:
    """In the block, the clients in this process know no other hub, and have their caches here."""
    with Hub(cache) as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(hub.url, cache).items():
            patch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "MODELSCOPE_DOMAIN"):
            patch.delenv(name, raising=False)
        # The client reads its variables when it is imported.
        for name in _client_modules():
            patch.delitem(sys.modules, name)
        constants = importlib.import_module("huggingface_hub.constants")
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield hub
        for name in _client_modules():
            del sys.modules[name]


def _client_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]


def environment(url: str, cache: Path) -> dict[str, str]:
    """For clients of this hub alone."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache / "huggingface"),
        "MODELSCOPE_ENDPOINT": url,
        "MODELSCOPE_CACHE": str(cache / "modelscope"),
        "MODELSCOPE_HOME": str(cache / "modelscope_home"),
    }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests.append(self.path)
        if self.hub.is_down:
            self.close_connection = True
            return
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._hugging_face_info("/".join(parts[2:4]), parts[4:5] == ["tree"])
        elif parts[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], parse_qs(url.query))
        elif parts[0] == "storage":
            self._file("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[2:3] == ["resolve"]:
            self._hugging_face_file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._answer(404)

    def _repository(self, name: str, file: bool = False) -> Optional[Repository]:
        """None after an answer that refuses."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._answer(404, {"X-Error-Code": "RepoNotFound"})
            return None
        refusal = repository.refusal
        if refusal is not None and (file or not refusal.files_only):
            self._answer(refusal.status, {"X-Error-Code": refusal.code})
            return None
        if repository.moved_to:
            self._answer(307, {"Location": self.path.replace(name, repository.moved_to)})
            return None
        return repository

    def _hugging_face_info(self, name: str, tree: bool) -> None:
        """What the client lists files with: before version 2 their names, from then on the tree."""
        repository = self._repository(name)
        if repository is None:
            return
        if tree:
            self._json([_tree_entry(*one) for one in repository.files.items()])
        else:
            siblings = [{"rfilename": file} for file in repository.files]
            self._json({"id": name, "sha": repository.sha, "siblings": siblings})

    def _hugging_face_file(self, name: str, file: str) -> None:
        repository = self._repository(name, file=True)
        if repository is None:
            return
        if file not in repository.files:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.files[file]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        if file.endswith(LARGE):
            size = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": etag}
            place = {"Location": f"{self.hub.storage}/{name}/{file}"}
            self._answer(302, {"X-Repo-Commit": repository.sha, **size, **place})
        else:
            self._file(name, file, {"X-Repo-Commit": repository.sha, "ETag": etag})

    def _modelscope(self, name: str, rest: list[str], query: dict[str, list[str]]) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if rest == ["repo", "files"]:
            files = [
                {
                    **{"Path": file, "Name": Path(file).name, "Type": "blob"},
                    **{"Size": len(content), "Sha256": hashlib.sha256(content).hexdigest()},
                    "Revision": repository.sha,
                }
                for file, content in repository.files.items()
            ]
            self._json({"Code": 200, "Success": True, "Data": {"Files": files}})
        elif rest in ([], ["revisions"]):  # only the client before 1.38 asks for these
            branches = {"Branches": [{"Revision": "master", "CreatedAt": 1700000000}], "Tags": []}
            self._json({"Code": 200, "Success": True, "Data": {"RevisionMap": branches}})
        elif rest == ["repo"]:
            self._file(name, query["FilePath"][0])
        else:
            self._answer(404)

    def _file(self, name: str, file: str, headers: Optional[dict[str, str]] = None) -> None:
        """The bytes, from where the client asks for them, and perhaps not all of them."""
        repository = self.hub.repositories[name]
        content = repository.files[file]
        begin, status, headers = 0, 200, dict(headers or {})
        wanted = self.headers.get("Range")
        if wanted is not None:
            first, _, last = wanted[len("bytes=") :].partition("-")
            begin, end, status = int(first), int(last or len(content) - 1), 206
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            content = content[: end + 1]
        body = content[begin:]
        if self.command == "HEAD":
            self._answer(status, headers, size=len(body))
            return
        self.hub.transfers.append((file, begin))
        cuts = repository.cuts[file]
        sent = min(cuts.pop(0), len(body)) if cuts else len(body)
        self._answer(status, headers, size=len(body), body=body[:sent])
        self.close_connection = sent < len(body) or self.close_connection

    def _json(self, values: Any) -> None:
        body = json.dumps(values).encode()
        self._answer(200, {"Content-Type": "application/json"}, size=len(body), body=body)

    def _answer(
        self,
        status: int,
        headers: Optional[dict[str, str]] = None,
        size: int = 0,
        body: bytes = b"",
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing on stderr."""


def _tree_entry(file: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": file, "size": len(content)}
    sha = hashlib.sha256(content).hexdigest()
    large = {"lfs": {"oid": sha, "size": len(content), "pointerSize": 134}}
    return {**entry, "oid": sha[:40], **(large if file.endswith(LARGE) else {})}
