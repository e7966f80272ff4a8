"""Writes one episode as an HTML file that people can send: facts, and the conversation.

The file has no scripts and loads nothing. All text of models and tasks is escaped.
"""

import datetime
from collections.abc import Sequence
from html import escape
from importlib import resources

from astraflow.addons.view.conversation import Block, Part, Piece
from astraflow.addons.view.episode import EpisodeView
from astraflow.addons.view.episode_sequences import SequenceView

__all__ = ["episode_html"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: no scripts, and nothing loaded from elsewhere."""
_MAX_CHARS = 600_000
"""Maximum number of characters of all messages together."""
_MAX_MESSAGE = 100_000
_MAX_IMAGES = 300_000
"""Maximum number of characters of all images together."""
_NUM_COLORS = 8
_NAMES = {"": "reply", "assistant": "earlier answer"}
"""Names of the roles that are not shown as they are called."""


class _Room:
    """What still fits into the file."""

    def __init__(self) -> None:
        self.chars = _MAX_CHARS
        self.images = _MAX_IMAGES

    def text(self, text: str) -> str:
        """Escapes a text, cut to what fits."""
        limit = max(0, min(_MAX_MESSAGE, self.chars))
        self.chars -= min(limit, len(text))
        if len(text) > limit:
            text = f"{text[:limit]}\n\u2026 {len(text) - limit:,} more characters"
        return escape(_visible(text))


def episode_html(view: EpisodeView, run: str) -> str:
    """Makes the file of an episode of a run."""
    row = view.row
    name = f"{'e' if row['kind'] == 'eval' else ''}{row['group']}.{row['episode']}.{row['attempt']}"
    title = escape(_visible(f"Episode {name} of {run}"))
    style = resources.files("astraflow.addons.view").joinpath("assets", "episode_file.css")
    said = [view.reward_said, view.versions_said, *view.problems]
    room = _Room()
    speakers = list(dict.fromkeys([sequence.speaker for sequence in view.sequences]))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title><style>{style.read_text(encoding='utf-8')}</style></head><body><main>",
        f"<h1>{title}</h1>",
        *[f'<p class="said">{escape(_visible(words))}</p>' for words in said if words],
        _facts(view, run),
        *([f"<pre>{room.text(view.failure)}</pre>"] if view.failure else []),
        *[
            _sequence(sequence, number, speakers, room, is_alone=len(view.sequences) == 1)
            for number, sequence in enumerate(view.sequences, 1)
        ],
    ]
    return "\n".join([*parts, "</main></body></html>\n"])


def _visible(text: str) -> str:
    """Shows control characters and changes of the writing direction as symbols, which HTML would obey."""
    return "".join([_symbol(char) for char in text]) if not text.isprintable() else text


def _symbol(char: str) -> str:
    code = ord(char)
    if code < 0x20 and char not in "\n\t":
        return chr(0x2400 + code)
    return "\u25c7" if 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 else char


def _facts(view: EpisodeView, run: str) -> str:
    row = view.row
    versions = [row["oldest_version"], row["newest_version"]]
    shown = " to ".join([str(each) for each in dict.fromkeys(versions) if each is not None])
    at = datetime.datetime.fromtimestamp(row["at_s"], datetime.UTC)
    end = row["error"] or ", ".join([each for each in (row["finish"], row["fate"]) if each])
    facts = {
        "run": run,
        "task": row["task"],
        "policy": row["policy"],
        "reward": None if row["reward"] is None else f"{row['reward']:.4g}",
        "versions": shown,
        "tokens": row["tokens"],
        "end": end,
        "step": row["step"],
        "arrived": f"{at:%Y-%m-%d %H:%M} UTC",
    }
    return "".join(
        [
            "<dl>",
            *[
                f"<div><dt>{name}</dt><dd>{escape(_visible(str(value)))}</dd></div>"
                for name, value in facts.items()
                if value not in {None, ""}
            ],
            "</dl>",
        ]
    )


def _sequence(
    sequence: SequenceView, number: int, speakers: Sequence[str], room: _Room, *, is_alone: bool
) -> str:
    parts: list[str] = []
    if not is_alone:
        about = [sequence.origin.relation, "" if sequence.reward is None else f"reward {sequence.reward:.4g}"]
        told = ", ".join([each for each in about if each])
        parts.append(f"<h2>{number}. {escape(_visible(sequence.speaker))} <small>{escape(told)}</small></h2>")
    if sequence.is_left_out:
        parts.append("<p>The messages are too long for this file.</p>")
    blocks = sequence.blocks[sequence.num_shared :]
    if sequence.num_shared:
        parts.append(f"<p>{sequence.num_shared} messages as in sequence {sequence.origin.parent + 1}</p>")
    parts += [_block(block, speakers, room) for block in blocks]
    return "\n".join(parts)


def _block(block: Block, speakers: Sequence[str], room: _Room) -> str:
    name = block.speaker or _NAMES.get(block.role, block.role)
    look = "given"
    if block.speaker:
        known = speakers.index(block.speaker) if block.speaker in speakers else len(speakers)
        look = f"answer c{known % _NUM_COLORS}"
    reward = f" <small>reward {block.reward:.4g}</small>" if block.reward else ""
    inner = "".join([_part(part, room) for part in block.parts])
    inner = inner or "<p><small>empty</small></p>"
    return f'<section class="{look}"><h3>{escape(_visible(name))}{reward}</h3><div>{inner}</div></section>'


def _part(part: Part, room: _Room) -> str:
    text = f"<pre>{_pieces(part.pieces, room)}</pre>"
    match part.kind:
        case "image":
            return _image(part, room)
        case "thinking":
            ended = f" ({part.problem})" if part.problem else ""
            summary = f"thinking, {len(part.text.split()):,} words{ended}"
            return f"<details><summary>{summary}</summary>{text}</details>"
        case "call":
            problem = f"<p>{escape(_visible(part.problem))}</p>" if part.problem else ""
            return f'<div class="call"><b>calls {escape(_visible(part.name))}</b>{text}{problem}</div>'
        case "result":
            return f'<div class="call"><b>result</b>{text}</div>'
        case _:
            return text


def _pieces(pieces: Sequence[Piece], room: _Room) -> str:
    """Joins the text of versions, with a mark where the version changes."""
    shown: list[str] = []
    for idx, piece in enumerate(pieces):
        if idx and piece.version != pieces[idx - 1].version:
            shown.append(f'<span class="switch">version {piece.version} from here</span>')
        shown.append(room.text(piece.text))
    return "".join(shown)


def _image(part: Part, room: _Room) -> str:
    if not part.name or len(part.name) > room.images:
        return f"<p>{escape(part.problem) or 'an image that is too large for this file'}</p>"
    room.images -= len(part.name)
    return f'<img alt="an image of the episode" src="{escape(part.name)}">'
