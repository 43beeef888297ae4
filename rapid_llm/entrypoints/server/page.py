"""GET / and /page/...: the built-in page, from the files of entrypoints/page. It calls this server and nobody else."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag: a page never calls a server of another version
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile(NamedTuple):
    """A file of the page: its bytes, its media type, and a hash of it."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """The files by the path that each is served at."""
    files = {path.name: path for path in FOLDER.iterdir() if path.suffix in _TYPES}
    return {"/" if name == "index.html" else f"/page/{name}": _read(path) for name, path in files.items()}


async def page(request: Request) -> Response:
    """One of the files, or that it is the one the browser has."""
    file = page_files().get(request.url.path)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def is_page(path: str) -> bool:
    """Whether a path is the page's: served without a key, since it has to come before it can ask for one."""
    return path == "/" or path.startswith("/page/")


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
