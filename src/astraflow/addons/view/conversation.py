"""Shows token sequences as conversations: who said what, with reasoning, calls, results, and images apart.

A trajectory has tokens and no messages. What its policy sampled are answers. The text that it was given is
split at the markers of chat templates; text without markers is one message. Text that can't be read as a call
or a marker is shown as it is, so nothing here fails.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.addons.formats.readers import calls_in_any_format
from astraflow.types import Item, MediaRef, Message, Trajectory
from astraflow.types.model_text import channel_messages, find_reasoning
from astraflow.workflows.calls import bare_json_calls, tagged_calls

__all__ = [
    "MessageBlock",
    "MessagePart",
    "PartKind",
    "TextPiece",
    "blocks_of_messages",
    "blocks_of_trajectory",
    "newest_message",
    "speaker_of",
    "versions_of",
    "without_ends",
    "without_markers",
]

PartKind = Literal["text", "thinking", "call", "result", "image"]
Decoder = Callable[[Sequence[int]], str]

_MAX_TEXT = 200_000
"""Maximum number of characters of a block."""
_MAX_BLOCKS = 2_000
_MAX_PARTS = 200
"""Maximum number of parts of a block; the rest of its text is one part."""
_MAX_IMAGE = 4_000_000
_IMAGE = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")


class TextPiece(Item, frozen=True, kw_only=True):
    """Text that one version sampled."""

    text: str
    version: int = -1
    """-1: the text was given."""


class MessagePart(Item, frozen=True, kw_only=True):
    """A stretch of a message of one kind."""

    kind: PartKind
    pieces: tuple[TextPiece, ...] = ()
    name: str = ""
    """The function that a call names; the URI of an image."""
    problem: str = ""
    """Why a call can't be read."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join([piece.text for piece in self.pieces])


class MessageBlock(Item, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or empty if the template has no marker for it."""
    speaker: str = ""
    """The policy that sampled it, and its role; empty if it was given."""
    parts: tuple[MessagePart, ...] = ()
    turn: int = 0
    """Number of the completion in its sequence, counted from 1; 0 if it was not sampled there."""
    reward: float = 0.0
    """Reward of the completion alone."""
    start: int = 0
    """Position of its first token."""

    @property
    def text(self) -> str:
        """The whole text, without images."""
        return "\n".join([part.text for part in self.parts if part.kind != "image"])


# --- sequences ------------------------------------------------------------------------------------


def versions_of(trajectory: Trajectory) -> NDArray[np.int64]:
    """Returns the version that sampled each token; -1 where the token was given."""
    versions = np.full(len(trajectory.mask), -1)
    for span in trajectory.versions:
        versions[span.start : span.start + span.length] = span.version
    return versions


def blocks_of_trajectory(trajectory: Trajectory, decode: Decoder) -> tuple[MessageBlock, ...]:
    """Splits a trajectory into messages. `decode` returns the text of tokens, including special tokens."""
    ids: list[int] = wire.array(trajectory.token_ids, "int32").tolist()
    versions = versions_of(trajectory)
    speaker = speaker_of(trajectory.policy, trajectory.role)
    blocks: list[MessageBlock] = []
    pos = 0
    for number, turn in enumerate(trajectory.turns, 1):
        given = _given_blocks(ids, pos, turn.start, decode, trajectory.media, is_first=pos == 0)
        is_thinking = _opens_answer(given)
        blocks += given
        pieces = [
            TextPiece(text=decode(ids[first : last + 1]), version=version)
            for version, first, last in _runs(versions, turn.start, turn.end)
        ]
        blocks.append(
            MessageBlock(
                role="assistant",
                speaker=speaker,
                parts=_parts(_without_end(pieces), is_answer=True, is_thinking=is_thinking),
                turn=number,
                reward=turn.reward,
                start=turn.start,
            )
        )
        pos = turn.end
        if len(blocks) > _MAX_BLOCKS:
            return tuple(blocks[:_MAX_BLOCKS])
    blocks += _given_blocks(ids, pos, len(ids), decode, trajectory.media, is_first=pos == 0)
    return tuple(blocks[:_MAX_BLOCKS])


def blocks_of_messages(messages: Iterable[Message]) -> tuple[MessageBlock, ...]:
    """Converts messages that a run keeps. They name the policy of each answer."""
    return tuple(
        MessageBlock(
            role=message.role,
            speaker=message.name if message.role == "assistant" else "",
            parts=_parts(
                [TextPiece(text=_cut(message.content))],
                is_answer=message.role == "assistant",
                is_result=message.role == "tool",
            )
            if message.role != "system"
            else _plain(_cut(message.content)),
        )
        for message in list(messages)[:_MAX_BLOCKS]
    )


def speaker_of(policy: str, role: str) -> str:
    """Names a policy and its role, or only the role if that names the policy."""
    return f"{policy} as {role}" if role and not role.startswith(policy) else role or policy


def _runs(versions: NDArray[np.int64], start: int, end: int) -> Iterable[tuple[int, int, int]]:
    """Yields (version, first token, last token) for each stretch of tokens of one version."""
    for version, places in groupby(range(start, end), key=lambda idx: int(versions[idx])):
        run = list(places)
        yield version, run[0], run[-1]


# --- what was given -------------------------------------------------------------------------------

_ROLE = re.compile(
    r"<\|im_start\|>([\w-]{1,40})\n?"
    r"|<\|start_header_id\|>([\w-]{1,40})<\|end_header_id\|>\n{0,2}"
    r"|<start_of_turn>([\w-]{1,40})\n?"
    r"|<\|turn>([\w-]{1,40})\n?"
    r"|<\|start\|>([\w.-]{1,80})(?:<\|channel\|>\w{1,40})?[^<]{0,80}<\|message\|>"
    r"|<\|(system|user|assistant|observation)\|>\n?"
    r"|<｜(User|Assistant)｜>"  # noqa: RUF001 - DeepSeek's own bars
    r"|<(assistant)>"
    r"|(\[/?INST\])"
)
"""The openings of messages in the chat templates of common model families."""
_ROLES = {
    "model": "assistant",
    "[/INST]": "assistant",
    "[INST]": "user",
    "ipython": "tool",
    "observation": "tool",
    "developer": "system",
}
_ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    *("<eos>", "</s>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end a message or a text."""
_BEGINS = ("<bos>", "<s>", "<|begin_of_text|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>")
_AROUND = re.compile("|".join(map(re.escape, (*_ENDS, *_BEGINS))))
_SHOWN_IMAGE = re.compile(
    r"(?:<\|vision_start\|>)?(?:<\|image_pad\|>|<image>|<\|image\|>|<image_soft_token>|\[IMG\])+(?:<\|vision_end\|>)?"
)
_PLACE = "\ue010"
"""Stands for an image while a text is split: a private-use character."""


def _given_blocks(
    ids: Sequence[int],
    start: int,
    end: int,
    decode: Decoder,
    media: Sequence[MediaRef],
    *,
    is_first: bool,
) -> list[MessageBlock]:
    """Splits given text at the markers of chat templates. The last block may be an answer's opening."""
    if start >= end:
        return []
    images = [each.uri for each in media if start <= each.start < end and each.kind == "image"]
    text = decode(ids[start:end])
    if images:
        text = _SHOWN_IMAGE.sub(_PLACE, text.replace(_PLACE, ""))
    blocks: list[MessageBlock] = []
    for role, message in _split(text):
        content = _AROUND.sub("", message)
        num_images = content.count(_PLACE) if images else 0
        parts = _given_parts(content, images[:num_images], role)
        images = images[num_images:]
        if parts or role == "assistant":
            is_result = bool(parts) and all(part.kind == "result" for part in parts)
            name = "tool" if is_result else role or ("user" if is_first else "")
            blocks.append(MessageBlock(role=name, parts=parts, start=start))
    if images:  # their places are unknown
        parts = tuple([_image(uri) for uri in images])
        blocks.insert(max(0, len(blocks) - 1), MessageBlock(role="user", parts=parts, start=start))
    return blocks


def without_markers(text: str) -> str:
    """Returns text without the markers of chat templates."""
    return _AROUND.sub("", _ROLE.sub(" ", text))


def newest_message(text: str) -> str:
    """Returns the newest message in given text that is not an answer, without the markers of templates."""
    messages = [_AROUND.sub("", message).strip() for role, message in _split(text) if role != "assistant"]
    return next((message for message in reversed(messages) if message), text)


def _split(text: str) -> Iterable[tuple[str, str]]:
    """Yields (role, text) for each message; the role of text before the first marker is empty."""
    role = ""
    pos = 0
    for marker in _ROLE.finditer(text):
        yield role, text[pos : marker.start()]
        name = next(group for group in marker.groups() if group)
        role = _ROLES.get(name, name.lower())
        pos = marker.end()
    yield role, text[pos:]


def _plain(text: str) -> tuple[MessagePart, ...]:
    """Makes the part of a system message, whose calls are only examples of calls."""
    content = text.strip()
    return (MessagePart(kind="text", pieces=(TextPiece(text=content),)),) if content else ()


def _given_parts(text: str, images: Sequence[str], role: str) -> tuple[MessagePart, ...]:
    """Makes the parts of a given text, in which a private-use character stands for each image."""
    if role == "system" and not images:
        return _plain(_cut(text))
    parts: list[MessagePart] = []
    uris = iter(images)
    for idx, content in enumerate(text.split(_PLACE) if images else [text]):
        if idx:
            parts.append(_image(next(uris)))
        pieces = [TextPiece(text=_cut(content))]
        parts += _parts(pieces, is_answer=role == "assistant", is_result=role == "tool")
    return tuple(parts)


def _image(uri: str) -> MessagePart:
    """Makes the part of an image. Only data of the two kinds that items may hold is shown."""
    if len(uri) > _MAX_IMAGE:
        return MessagePart(kind="image", problem=f"an image of {len(uri):,} characters is too large to show")
    if not _IMAGE.fullmatch(uri):
        return MessagePart(kind="image", problem="the image is neither PNG nor JPEG data")
    return MessagePart(kind="image", name=uri)


def _opens_answer(blocks: list[MessageBlock]) -> bool:
    """Removes the opening of the next answer from given blocks; returns whether it opens reasoning."""
    if not blocks or blocks[-1].role != "assistant":
        return False
    opening = blocks[-1]
    kinds = {part.kind for part in opening.parts}
    if opening.text.strip() and kinds != {"thinking"}:
        return False
    blocks.pop()
    return any(part.problem for part in opening.parts)


# --- parts of a text ------------------------------------------------------------------------------

_CALLS = {
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": "",
    "<|python_tag|>": "",
    "<|tool_call|>": "",
    "functools[": "",
    "<|tool_call>": "<tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5cDSML\uff5cfunction_calls>": "</\uff5cDSML\uff5cfunction_calls>",
    "<\uff5cDSML\uff5ctool_calls>": "</\uff5cDSML\uff5ctool_calls>",
    **{f"<{name}>": f"</{name}>" for name in ("minimax:tool_call", "seed:tool_call", "TOOLCALL")},
    **{f"<{name}>": f"</{name}>" for name in ("tool_calls", "function_calls")},
}
"""The tags around calls. An empty closing tag means that the call goes on to the end of the text."""
_CLOSINGS = {**_CALLS, "<tool_response>": "</tool_response>"}
_OPENING = re.compile("|".join(map(re.escape, _CLOSINGS)))
NEVER_ENDED = "it never ended"


def _without_end(pieces: Sequence[TextPiece]) -> list[TextPiece]:
    """Removes end tokens from the last pieces of an answer, and cuts a very long answer."""
    answer = list(pieces)
    while answer:
        last = answer.pop()
        if text := without_ends(last.text):
            answer.append(TextPiece(text=text, version=last.version))
            break
    room = _MAX_TEXT
    for idx, piece in enumerate(answer):
        if len(piece.text) > room:
            return [*answer[:idx], TextPiece(text=_cut(piece.text, room), version=piece.version)]
        room -= len(piece.text)
    return answer


def without_ends(text: str) -> str:
    """Removes end tokens, and the white space before them, from the end of a text."""
    end = len(text)
    while ending := next((each for each in _ENDS if text.endswith(each, 0, end)), ""):
        end -= len(ending)
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _cut(text: str, limit: int = _MAX_TEXT) -> str:
    """Truncates very long text, and replaces lone surrogates, which JSON can't hold."""
    cut = text[:limit]
    if len(text) > limit:
        cut += f"\n... {len(text) - limit} more characters"
    return cut.encode("utf-8", "replace").decode()


def _parts(
    pieces: Sequence[TextPiece], *, is_answer: bool, is_thinking: bool = False, is_result: bool = False
) -> tuple[MessagePart, ...]:
    """Splits a text into reasoning, calls, results, and the rest."""
    text = "".join([piece.text for piece in pieces])
    if is_result:
        content = text.replace("<tool_response>", "").replace("</tool_response>", "")
        return (
            (MessagePart(kind="result", pieces=(TextPiece(text=content.strip()),)),)
            if content.strip()
            else ()
        )
    calls = bare_json_calls(text) if is_answer and not is_thinking else ()
    if calls and not any(call.problem for call in calls):
        return (
            MessagePart(kind="call", pieces=tuple(pieces), name=", ".join([call.name for call in calls])),
        )
    parts: list[MessagePart] = []
    for kind, start, end, is_closed in _spans(text, is_thinking=is_thinking):
        own = _pieces_in(pieces, start, end)
        is_news = kind == "call" or (kind == "thinking" and not is_closed)  # that it is empty says something
        if not own and not is_news:
            continue
        name = ""
        problem = "" if is_closed else NEVER_ENDED
        if kind == "call":
            name, problem = _read_call(text, start, end)
        parts.append(MessagePart(kind=kind, pieces=own, name=name, problem=problem))
    return tuple(parts)


def _spans(text: str, *, is_thinking: bool) -> Iterable[tuple[PartKind, int, int, bool]]:
    """Yields (kind, start, end, whether it is closed) of each part, without its tags."""
    if messages := channel_messages(text):
        for each in messages:
            kind: PartKind = "thinking" if each.is_reasoning else "call" if each.is_call else "text"
            yield kind, each.place.text_start, each.place.text_end, each.place.is_finished or kind == "text"
        yield "text", messages[-1].place.end, len(text), True
        return
    reasoning = find_reasoning(text, begins_inside=is_thinking)
    if reasoning is None:
        yield from _spans_between(text, 0, len(text))
        return
    yield from _spans_between(text, 0, reasoning.start)
    yield "thinking", reasoning.text_start, reasoning.text_end, reasoning.is_finished
    yield from _spans_between(text, reasoning.end, len(text))


def _spans_between(text: str, pos: int, last: int) -> Iterable[tuple[PartKind, int, int, bool]]:
    """Yields the parts of text that isn't reasoning, from `pos` to `last`."""
    num = 0
    while num < _MAX_PARTS and (opening := _OPENING.search(text, pos, last)):
        num += 1
        yield "text", pos, opening.start(), True
        closing = _CLOSINGS[opening[0]]
        end = text.find(closing, opening.end(), last) if closing else last
        is_closed = end >= 0
        end = end if is_closed else last
        yield "call" if opening[0] in _CALLS else "result", opening.end(), end, is_closed
        pos = min(last, end + len(closing))
    yield "text", pos, last, True


def _pieces_in(pieces: Sequence[TextPiece], start: int, end: int) -> tuple[TextPiece, ...]:
    """Cuts `[start, end)` of the text, without white space around it, out of the pieces of the whole text."""
    cut: list[TextPiece] = []
    pos = 0
    for piece in pieces:
        text = piece.text[max(0, start - pos) : max(0, end - pos)]
        pos += len(piece.text)
        if not cut:
            text = text.lstrip()
        if text:
            cut.append(TextPiece(text=text, version=piece.version))
        if pos >= end:
            break
    while cut and not cut[-1].text.rstrip():
        cut.pop()
    if cut:
        cut[-1] = TextPiece(text=cut[-1].text.rstrip(), version=cut[-1].version)
    return tuple(cut)


def _read_call(text: str, start: int, end: int) -> tuple[str, str]:
    """Returns the names of the functions that the call at this place names, and why it can't be read."""
    calls = [call for call in calls_in_any_format(text) if call.start < end and start < call.end]
    calls = calls or tagged_calls(f"<tool_call>{text[start:end]}</tool_call>")
    names = ", ".join([call.name for call in calls if call.name])
    return names, next((call.problem for call in calls if call.problem), "")
