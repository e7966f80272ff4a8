"""`astraflow traces` with OpenTelemetry's own exporters, in `.venv-trackers` (`make test-trackers`)."""

import http.server
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from astraflow.addons.view.trace_export import TraceExport
from astraflow.recipe.run_folder import RunFolder
from drivers.tracker_driver import TrackedFolder, make_eval, make_step
from drivers.view_runs import RunWriter

pytestmark = [pytest.mark.trackers, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
Bodies = dict[str, bytes]


@contextmanager
def collector(bodies: Bodies, *, status: int = 200) -> Iterator[str]:
    """The address of a collector that keeps what it is sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            bodies[self.path] = bodies.get(self.path, b"") + data
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def make_run(folder: Path) -> None:
    run = RunWriter(folder)
    run.group(0, [0.0, 1.0], version=2)
    run.close()
    tracked = TrackedFolder(folder)
    tracked.run(make_step(0), make_eval(1))


def send(folder: Path, endpoint: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(PYTHON), "-m", "astraflow.cli.main", "traces", str(folder), "--endpoint", endpoint]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_a_collector_gets_each_episode_as_a_trace_and_the_numbers(tmp_path: Path) -> None:
    make_run(tmp_path)
    bodies: Bodies = {}
    with collector(bodies) as url:
        done = send(tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert "sent " in done.stderr
    for name in (b"rollout-0", b"episode", b"workflow 0", b"table actor", b"astraflow.score"):
        assert name in bodies["/v1/traces"], name
    for name in (b"astraflow.step.loss", b"astraflow.eval.score_mean", b"heldout"):
        assert name in bodies["/v1/metrics"], name
    kept: list[bytes] = []

    class Kept:
        def send(self, spans: object) -> None:
            kept.extend(span.trace_id.to_bytes(16) for span in spans)  # type: ignore[attr-defined]

        def send_rows(self, rows: object) -> None:
            del rows

    TraceExport(RunFolder(tmp_path), Kept(), run_id="run-1").take()
    assert kept
    assert all(trace_id in bodies["/v1/traces"] for trace_id in kept)


def test_a_collector_that_refuses_is_said(tmp_path: Path) -> None:
    make_run(tmp_path)
    with collector({}, status=400) as url:
        done = send(tmp_path, url)
    assert done.returncode == 1
    assert "does not take spans" in done.stderr
