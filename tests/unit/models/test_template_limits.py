"""A chat template that never ends, or raises an error of any kind, ends as an error that says so."""

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from astraflow.errors import DataError
from astraflow.models import template_limits
from astraflow.models.stop_ids import template_end
from astraflow.models.template_limits import render_chat

USER = [{"role": "user", "content": "1 + 1?"}]
NESTED = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}{% endfor %}"


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [NESTED, RECURSIVE, LONG], ids=["nested", "recursive", "long"])
def test_a_template_that_never_ends_is_stopped(template: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(DataError, match=r"takes longer than 0\.2 s"):
        render_chat(tokenizer_of(template), USER, longest_s=0.2)
    assert time.monotonic() - began_s < 5


def test_a_template_is_stopped_in_a_thread_other_than_the_main_one() -> None:
    said: list[str] = []

    def render() -> None:
        try:
            render_chat(tokenizer_of(NESTED), USER, longest_s=0.2)
        except DataError as err:
            said.append(str(err))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(10)
    assert len(said) == 1


def test_interruptions_leave_no_lock_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_LOOK_S", 0.0)
    monkeypatch.setattr(template_limits, "_watcher", template_limits._Watcher())
    switches_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    until_s = time.monotonic() + 3

    def call_often() -> None:
        while time.monotonic() < until_s:
            for number in range(100):
                with contextlib.suppress(DataError):
                    template_limits.within_limit(lambda: str(sum(range(3000))), 2e-6 * number)

    threads = [threading.Thread(target=call_often, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    sys.setswitchinterval(switches_s)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(sys.platform != "linux", reason="there are clocks of threads on Linux only")
def test_the_time_that_a_process_is_stopped_is_not_that_of_its_template() -> None:
    code = (
        "import sys\n"
        "from astraflow.models.template_limits import within_limit\n"
        "print('ready', flush=True)\n"
        "rest = iter(range(3_000_000))\n"
        "print(within_limit(lambda: str(sum(1 for _ in rest)), 2.0))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "3000000\n"


def test_a_limit_that_ends_with_the_call_interrupts_nothing_later() -> None:
    tokenizer = tokenizer_of("{{ messages[0].content }}")
    num_ended = 0
    for number in range(300):
        try:
            render_chat(tokenizer, USER, longest_s=1e-5 * (number % 40))
            num_ended += 1
        except DataError:
            pass
        sum(range(2000))  # an interruption that was left over would be raised here
    assert render_chat(tokenizer, USER) == "1 + 1?"
    assert num_ended


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% include 'other.jinja' %}", "no loader"),
        ("{% import 'other.jinja' as other %}", "no loader"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_raises_is_a_data_error(template: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        render_chat(tokenizer_of(template), USER)
    assert template_end(tokenizer_of(template)) is None
