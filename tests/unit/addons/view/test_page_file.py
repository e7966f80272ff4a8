import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.view.commands import save_episode, write_report
from astraflow.cli.main import main
from astraflow.errors import DataError
from astraflow.types import MediaRef
from drivers.talk_runs import said, save_tokenizer, talk
from drivers.view_runs import RunWriter

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\u202e"
PNG = "data:image/png;base64,iVBORw0KGgo="
STEP = '{"kind":"step","policy":"actor","step":%d,"version":1,"at_s":5.0,"reward_mean":%s}\n'


class Page(HTMLParser):
    """A page in a file: its scripts, and what it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self._in_script = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [str(values[name]) for name in ("src", "href") if name in values]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(values["content"])
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data

    @property
    def answers(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    def check(self) -> None:
        """The file runs its own script and no other, and loads nothing."""
        assert self.links == []
        assert len(self.scripts) == 2
        assert "<" not in self.scripts[0]
        digest = base64.b64encode(hashlib.sha256(self.scripts[1].encode()).digest()).decode()
        assert f"default-src 'none'; script-src 'sha256-{digest}';" in self.policy
        assert not re.search(r"https?:|'self'|unsafe-eval", self.policy)


def make_run(folder: Path, task: str = "heldout/1") -> None:
    run = RunWriter(folder)
    run.eval_result("e0.0.0", 0.0)
    run.transcript(0, 0.0, "What is <b>1 + 1</b>?", kind="eval", task=task)
    run.close()
    rows = [*(STEP % (step, step / 10) for step in range(1, 5)), STEP % (5, "null")]
    (folder / "metrics.jsonl").write_text("".join(rows))


def test_a_report_is_the_page_with_its_answers_inside(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", task=HOSTILE)
    out = tmp_path / "report.html"
    write_report([tmp_path / "a", tmp_path / "b"], out)
    page = Page(out)
    page.check()
    answers = page.answers
    assert answers["start"] == "#/compare?runs=a%2Cb"
    assert [run["name"] for run in answers["api/runs"]] == ["a", "b"]
    assert [row["step"] for row in answers["api/runs/a/metrics?after=0"]] == [1, 2, 3, 4, 5]
    assert "has no run.json" in answers["api/runs/a/now"]["status"]["problem"]
    assert answers["api/runs/a/index"]["is_complete"]
    assert "api/comparison?runs=a,b" in answers
    (episode,) = answers["api/runs/b/episodes?limit=50"]["rows"]
    assert episode["task"] == HOSTILE
    words = answers[f"api/runs/b/episodes/{episode['id']}"]["messages"][0]["content"]
    assert words == "What is <b>1 + 1</b>?"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        write_report([tmp_path], tmp_path / "report.html")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an episode of two policies, and a long one."""
    run = RunWriter(tmp_path / "run")
    run.draw(0, task=HOSTILE, policies=("solver", "judge"))
    media = (MediaRef(kind="image", uri=PNG, start=0),)
    run.play(
        "0.0.0",
        talk(f"2 + 3? {HOSTILE}<assistant>", said("<think>hm</think>it is 6"), policy="solver", media=media),
        talk("Right? it is 6<assistant>", ((1, "no, "), (2, "it is 5")), policy="judge"),
        score=0.5,
    )
    run.draw(1)
    run.play("1.0.0", talk(*["question " * 40, said("answer " * 40)] * 100 + ["x" * 100_000, said("y")]))
    run.close()
    save_tokenizer(tmp_path / "run", tmp_path / "model", "solver", "judge", "actor")
    return tmp_path / "run"


def test_the_file_of_an_episode_has_its_conversation(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "episode.html"
    with pytest.raises(SystemExit) as ended:
        main(["episodes", str(run_dir), "--id", "2", "--html", str(out)])
    assert ended.value.code == 0
    page = Page(out)
    page.check()
    assert page.answers["start"] == "#/r/run/episode/2"
    view = page.answers["api/runs/run/episodes/2"]
    assert view["row"]["task"] == HOSTILE
    assert len(view["sequences"]) == 2
    assert PNG in out.read_text()


def test_the_file_of_a_long_episode_can_be_sent(run_dir: Path, tmp_path: Path) -> None:
    save_episode(run_dir, 3, tmp_path / "long.html")
    assert (tmp_path / "long.html").stat().st_size < 3_000_000


def test_an_episode_that_is_missing_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no episode with id 99"):
        save_episode(run_dir, 99, tmp_path / "no.html")
    with pytest.raises(SystemExit) as ended:
        main(["episodes", str(run_dir), "--html", str(tmp_path / "no.html")])
    assert ended.value.code != 0
    assert not (tmp_path / "no.html").exists()
