"""Where in the user's own code an exception came from, and what becomes of forks that return from it."""

import asyncio
import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from astraflow.user_input.own_code import describe_error, ending_forks, own_frames

REWARD = """
import json


class OddError(Exception):
    def __str__(self):
        raise ValueError("no text")


def score_of(text):
    data = json.loads(text)
    return data["score"]


def reward(text):
    if text == "odd":
        raise OddError
    if text == "long":
        raise ValueError("x" * 5000)
    return score_of(text)
"""


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "judged.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("judged").reward
    del sys.modules["judged"]


def raised(function: Any, *arguments: object) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        function(*arguments)
    return caught.value


def test_a_compiled_module_on_the_way_is_no_code_of_the_users() -> None:
    """A service runs in uvloop, so its frame lies around every exception, ours too."""

    async def fails() -> None:
        await asyncio.to_thread(json.loads, "{")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        error = raised(runner.run, fails())
    calls = own_frames(error)
    assert calls
    assert all(call.startswith(("tests/", str(Path(__file__).parent))) for call in calls), calls


def test_the_users_line_is_named_and_not_that_of_the_library_that_it_called(reward: Any) -> None:
    assert describe_error(raised(reward, '{"points": 1}')) == (
        "KeyError: 'score' (judged.py, line 12, in score_of: return data[\"score\"])"
    )
    assert describe_error(raised(reward, "{")) == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
        "(judged.py, line 11, in score_of: data = json.loads(text))"
    )


def test_the_calls_in_the_users_code_are_listed_from_the_outside_in(reward: Any) -> None:
    frames = own_frames(raised(reward, "{"))
    assert frames[-2:] == [
        "judged.py, line 20, in reward: return score_of(text)",
        "judged.py, line 11, in score_of: data = json.loads(text)",
    ]


def test_a_file_elsewhere_is_named_in_full(reward: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert f"({tmp_path}/judged.py, line 12, in score_of" in describe_error(raised(reward, "{}"))


def test_a_text_that_fails_or_is_endless_harms_nothing(reward: Any) -> None:
    assert describe_error(raised(reward, "odd")).startswith(
        "OddError: its __str__ fails, too (judged.py, line 17"
    )
    message = describe_error(raised(reward, "long"))
    assert len(message) < 1200
    assert message.endswith('... (judged.py, line 19, in reward: raise ValueError("x" * 5000))')


def test_a_group_of_exceptions_is_told_by_its_first_one(reward: Any) -> None:
    def group() -> None:
        raise ExceptionGroup("several", [raised(reward, "{}"), KeyError("b")])

    assert describe_error(raised(group)).startswith("KeyError: 'score' (judged.py, line 12")


def test_a_syntax_error_names_the_line_that_python_cannot_read(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_reward.py").write_text("def reward(task, text)\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    error = raised(importlib.import_module, "broken_reward")
    assert describe_error(error) == (
        "SyntaxError: expected ':' (broken_reward.py, line 1: def reward(task, text))"
    )


def test_an_installed_package_is_named_by_its_own_line(tmp_path: Path, monkeypatch: Any) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "their_reward.py").write_text(
        "import their_parser\ndef reward(text):\n    return their_parser.parse(text)\n", encoding="utf-8"
    )
    (installed / "their_parser.py").write_text("def parse(text):\n    return int(text)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(installed)
    reward = importlib.import_module("their_reward").reward
    code = compile("def call(f):\n    return f('x')\n", str(Path(json.__file__)), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    error = raised(names["call"], reward)
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # without this test's frame
    assert "their_reward.py, line 3, in reward: return their_parser.parse(text)" in describe_error(error)


def test_an_exception_without_a_line_of_the_users_is_told_without_one() -> None:
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(SystemExit(3)) == "SystemExit: 3"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def _forks() -> int:
    return os.fork()


def _forks_and_raises() -> int:
    if (pid := os.fork()) == 0:
        raise ValueError("in the fork")
    return pid


def _forks_without_python() -> int:
    return ctypes.CDLL(None).fork()


@pytest.mark.parametrize("fork", [_forks, _forks_and_raises, _forks_without_python])
def test_a_fork_that_returns_from_the_users_code_ends(
    fork: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    own = os.getpid()
    try:
        with ending_forks():
            pid = fork()
    finally:
        if os.getpid() != own:
            os._exit(0)  # it must not come here
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 70
    assert f"process {pid}, forked by process {own}, returned from user code" in capfd.readouterr().err


def test_a_child_that_ends_by_itself_is_left_alone() -> None:
    with ending_forks():
        code = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode
        pid = os.fork()
        if pid == 0:
            os._exit(4)
    _, status = os.waitpid(pid, 0)
    assert (code, os.waitstatus_to_exitcode(status)) == (3, 4)
