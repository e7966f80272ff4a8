import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from astraflow.addons.view.commands import save_episode
from astraflow.cli.main import main
from astraflow.errors import DataError
from astraflow.types import MediaRef
from drivers.talk_runs import said, save_tokenizer, talk
from drivers.view_runs import RunWriter

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\u202e"
PNG = "data:image/png;base64,iVBORw0KGgo="


class Tags(HTMLParser):
    """The names of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.names.append(tag)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an episode of two policies, whose second answer two versions sampled."""
    run = RunWriter(tmp_path / "run")
    run.draw(0, task=HOSTILE, policies=("solver", "judge"))
    media = (MediaRef(kind="image", uri=PNG, start=0),)
    run.play(
        "0.0.0",
        talk(f"2 + 3? {HOSTILE}<assistant>", said("<think>hm</think>it is 6"), policy="solver", media=media),
        talk("Right? it is 6<assistant>", ((1, "no, "), (2, "it is 5")), policy="judge"),
        score=0.5,
        metrics={"reward/format": 1.0, "reward/exact": 0.0},
    )
    run.draw(1)
    run.play("1.0.0", talk(*["question " * 40, said("answer " * 40)] * 100 + ["x" * 100_000, said("y")]))
    run.close()
    save_tokenizer(tmp_path / "run", tmp_path / "model", "solver", "judge", "actor")
    return tmp_path / "run"


def test_the_file_shows_the_conversation_and_loads_nothing(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "episode.html"
    with pytest.raises(SystemExit) as ended:
        main(["episodes", str(run_dir), "--id", "2", "--html", str(out)])
    assert ended.value.code == 0
    text = out.read_text()
    assert {"script", "link", "iframe"}.isdisjoint(Tags(text).names)
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64)', text) == []
    assert "default-src 'none'" in text
    assert "Episode 0.0.0 of run" in text
    assert "0: format passed, exact failed; the episode&#x27;s score is 0.5." in text
    assert "The answer was sampled across two versions: 1 wrote its first 4 tokens, 2 the other 7." in text
    assert "version 2 from here" in text
    assert "it is 6" in text
    assert "<summary>thinking, 1 words</summary>" in text
    assert "was shown turn 1 of sequence 1" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert PNG in text


def test_a_long_episode_stays_below_a_megabyte(run_dir: Path, tmp_path: Path) -> None:
    save_episode(run_dir, 3, tmp_path / "long.html")
    text = (tmp_path / "long.html").read_text()
    assert text.count("<section") == 202
    assert len(text.encode()) < 1_000_000


def test_an_episode_that_is_missing_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no episode with id 99"):
        save_episode(run_dir, 99, tmp_path / "no.html")
    with pytest.raises(SystemExit) as ended:
        main(["episodes", str(run_dir), "--html", str(tmp_path / "no.html")])
    assert ended.value.code != 0
    assert not (tmp_path / "no.html").exists()
