"""Text from outside has no effect on a terminal."""

import io

from astraflow.report.terminal_text import printable, speaker_of
from astraflow.report.view import PlainView
from astraflow.types import Message

EVIL = "[/x][bold]\x1b[2J\x1b]52;c;aGk=\x07\u202e\x9b31m"


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


def test_plain_lines_obey_nobody() -> None:
    out = io.StringIO()
    PlainView("run", "runs/run", out, clock=lambda: 0.0).note(EVIL)
    assert out.getvalue().startswith("[/x][bold]\\x1b[2J")
    assert "\x1b" not in out.getvalue()
