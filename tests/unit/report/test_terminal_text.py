"""Text from outside has no effect on a terminal."""

import io

from rich.console import Console

from astraflow.report.screen import PlainView, ScreenState, render
from astraflow.report.terminal_text import printable, speaker_of
from astraflow.types import Load, Message, StatusReply, Wait, WaitReason, WorkerStatus
from astraflow.types.waits import Party

EVIL = "[/x][bold]\x1b[2J\x1b]52;c;aGk=\x07\u202e\x9b31m"
EVIL_REASON = WaitReason(kind="scoring", detail=EVIL)


def test_hidden_characters_are_written_out() -> None:
    assert printable("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert printable("\u202eabc\u2028") == "\\u202eabc\\u2028"
    assert printable("two\nlines\t.") == "two\\nlines\\t."
    assert printable("two\nlines\t.\r", keeps_lines=True) == "two\nlines\t.\\r"
    assert (
        printable("\u00fc \u4e2d \U0001f468\u200d\U0001f469 [/x]")
        == "\u00fc \u4e2d \U0001f468\u200d\U0001f469 [/x]"
    )


def test_a_message_says_who_spoke() -> None:
    said = [Message(role="user", content=""), Message(role="assistant", content="", name="actor as verifier")]
    assert [speaker_of(message) for message in said] == ["user", "assistant (actor as verifier)"]


def evil_status() -> StatusReply:
    worker = WorkerStatus(
        id="w", name=EVIL, engine="torch", hosts=("actor",), num_leases=0, last_seen_s=0.0,
        load=Load(waits_for=(EVIL_REASON,)),
    )  # fmt: skip
    party = Party(kind="service", name=EVIL)
    wait = Wait(who=party, whom=party, reasons=(EVIL_REASON,), since_s=0.0)
    return StatusReply(
        name="run", state="running", reason="", now_s=1.0, policies=(), workers=(worker,), waits=(wait,)
    )


def test_markup_and_escapes_of_a_service_are_shown_as_text() -> None:
    state = ScreenState("run", "runs/run", 0.0)
    state.status = evil_status()
    state.notes.append(EVIL)
    console = Console(width=400, force_terminal=False, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(state, 1.0))
    text = captured.get()
    assert text.count("[/x][bold]\\x1b[2J") >= 4
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_plain_lines_obey_nobody() -> None:
    out = io.StringIO()
    PlainView("run", "runs/run", out, clock=lambda: 0.0).note(EVIL)
    assert out.getvalue().startswith("[/x][bold]\\x1b[2J")
    assert "\x1b" not in out.getvalue()
