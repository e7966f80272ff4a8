"""`astraflow data prepare` against a server that answers like the Hugging Face Hub."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from astraflow.addons.data_sets.catalogue import find_data_set
from astraflow.addons.data_sets.preparing import prepare
from astraflow.errors import UnavailableError
from drivers.published_rows import write_published

COMMIT = "0" * 39 + "1"


class Hub:
    """Serves the files of a folder as those of one data set, and counts what is sent."""

    def __init__(self, repository: str, folder: Path) -> None:
        self.sent: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(has_body=False)

            def do_GET(self) -> None:
                self._answer(has_body=True)

            def _answer(self, *, has_body: bool) -> None:
                path = self.path.partition("?")[0]
                prefix = f"/datasets/{repository}/resolve/{COMMIT}/"
                file = folder / path.removeprefix(prefix)
                if path.startswith(f"/api/datasets/{repository}/revision/"):
                    self._send(json.dumps({"id": repository, "sha": COMMIT}).encode(), has_body=has_body)
                elif path.startswith(prefix) and file.is_file():
                    if has_body:
                        hub.sent.append(file.name)
                    self._send(file.read_bytes(), has_body=has_body)
                else:
                    self.send_error(404)

            def _send(self, body: bytes, *, has_body: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if has_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Keeps the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    # The cache of whoever runs the tests stays as it is; the library reads its variable at import only.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_published("aime25", tmp_path / "published")
    served = Hub("math-ai/aime25", tmp_path / "published")
    yield served
    served.close()


def test_a_data_set_is_downloaded_once_and_its_commit_is_kept(hub: Hub, tmp_path: Path) -> None:
    aime = find_data_set("aime25")
    manifest = prepare(aime, tmp_path / "aime25", endpoint=hub.url, verifies=True, progress=print)
    (published,) = manifest.splits["test"].published
    assert (published.revision, published.file) == (COMMIT, "test.jsonl")
    assert hub.sent == ["test.jsonl"]
    prepare(aime, tmp_path / "aime25", endpoint=hub.url, progress=print)
    prepare(aime, tmp_path / "again", endpoint=hub.url, progress=print)
    assert hub.sent == ["test.jsonl"]  # the second time from the folder, the third time from the cache


def test_a_repository_that_is_not_there_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(
        UnavailableError,
        match=rf"HuggingFaceH4/MATH-500 .* {hub.url}: .*--from FOLDER",
    ):
        prepare(find_data_set("math500"), tmp_path / "math500", endpoint=hub.url, progress=print)
    assert not (tmp_path / "math500").exists()
