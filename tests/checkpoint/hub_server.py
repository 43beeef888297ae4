"""A hub on localhost for tests, which notes every request, and a cache on disk as huggingface_hub leaves it."""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def commit_of(files: dict[str, bytes]) -> str:
    """A commit hash for these files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def put_in_cache(cache: Path, repo: str, files: dict[str, bytes], *refs: str) -> Path:
    """Write a snapshot with its files as links to blobs, and the refs that name it. Returns the snapshot's folder."""
    store, commit = cache / f"models--{repo.replace('/', '--')}", commit_of(files)
    snapshot = store / "snapshots" / commit
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob, link = store / "blobs" / hashlib.sha1(data).hexdigest(), snapshot / name
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        file = store / "refs" / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative path."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


class HubServer:
    """Serves repositories over the two calls that a download makes: the list of files, and a file.

    Attributes:
        url: what HF_ENDPOINT is set to.
        repos: by "org/name" the revisions of a repository and their files.
        refusals: by a part of a path, the status and the X-Error-Code that it is answered with.
        asked: "METHOD path" of every request.
        tokens: every Authorization header that came.
        before: called with the path of a request before it is answered.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.before = lambda path: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, *_) -> None:
                pass

        # HTTP/1.0, so that no connection outlives the server.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop answering: from here on the port refuses."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Serve these files as a revision of a repository. Returns the commit."""
        commit = commit_of(files)
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        return commit

    def fetched(self) -> list[str]:
        """Files whose content was asked for, in order."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1] for path in self.asked if path.startswith("GET ") and "/resolve/" in path
        ]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.asked.append(f"{handler.command} {path}")
        self.tokens.add(handler.headers.get("Authorization", ""))
        self.before(path)
        status, body, headers = self._response(path)
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    def _response(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        for part, (status, code) in self.refusals.items():
            if part in path:
                return status, b"", {"X-Error-Code": code} if code else {}
        is_list = path.startswith("/api/models/")
        repo, _, rest = (
            path.removeprefix("/api/models" if is_list else "").strip("/").partition("/revision/" if is_list else "/resolve/")
        )
        if repo not in self.repos:
            return 401, b"", {"X-Error-Code": "RepoNotFound"}  # what the hub says of a model that is private, too
        revision, _, name = (rest, "", "") if is_list else rest.partition("/")
        files = self.repos[repo].get(revision)
        if files is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if is_list:
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return 200, json.dumps({"id": repo, "sha": commit_of(files), "siblings": siblings}).encode(), {}
        if name not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        etag = hashlib.sha1(files[name]).hexdigest()
        return 200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": commit_of(files)}


def point_client_at(url: str, monkeypatch, home: Path) -> None:
    """What HF_ENDPOINT does, for a huggingface_hub that is imported already: it reads its variables once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    # The client keeps a registry there, which it asks the hub for.
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "agents.json"), raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
