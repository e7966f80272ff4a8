"""A server on loopback that speaks as much of the Hugging Face Hub's API as downloading a model takes."""

import hashlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["HubServer", "hub_server"]


@dataclass
class HubServer:
    """Repositories by `OWNER/NAME`; each revision is a folder. `requests` is what was asked for."""

    url: str
    revisions: dict[tuple[str, str], Path] = field(default_factory=dict[tuple[str, str], Path])
    gated: set[str] = field(default_factory=set[str])
    slow: set[str] = field(default_factory=set[str])
    """Files whose content is sent late."""
    requests: list[str] = field(default_factory=list[str])

    def publish(self, repo: str, folder: Path, *revisions: str) -> str:
        """Makes a folder the content of `main` and of further revisions; returns its commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        for revision in ("main", commit, *revisions):
            self.revisions[repo, revision] = folder
        return commit

    def downloads(self) -> list[str]:
        """The files whose content was sent."""
        return [path.rsplit("/", 1)[-1] for path in self.requests if "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def _answer(self, *, has_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if has_body and parts[-1] in self.hub.slow:
            time.sleep(1.0)
        if has_body:
            self.hub.requests.append("/".join(parts))
        if len(parts) < len(("OWNER", "NAME", "resolve", "REVISION")):
            self._send(b"{}", {}, status=404)
            return
        if parts[:2] == ["api", "models"]:
            repo, kind, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        else:
            repo, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        folder = self.hub.revisions.get((repo, revision))
        if repo in self.hub.gated:
            self._send(b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"}, status=403)
        elif folder is None:
            is_known = any(known == repo for known, _ in self.hub.revisions)
            code = "RevisionNotFound" if is_known else "RepoNotFound"
            self._send(b"{}", {"X-Error-Code": code}, status=404)
        elif kind == "resolve":
            content = (folder / parts[4]).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": _commit(folder)}
            self._send(content, headers, has_body=has_body)
        else:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
            tree = [{"type": "file", "path": n, "size": s, "oid": f"{hash(n):x}"} for n, s in sizes.items()]
            siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            info = {
                "id": repo,
                "modelId": repo,
                "sha": _commit(folder),
                "siblings": siblings,
                "private": False,
            }
            self._send(json.dumps(tree if kind == "tree" else info).encode(), {}, has_body=has_body)

    def _send(
        self, content: bytes, headers: dict[str, str], *, status: int = 200, has_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(content)


def _commit(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


@contextmanager
def hub_server() -> Generator[HubServer]:
    """Serves until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = handler.hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
