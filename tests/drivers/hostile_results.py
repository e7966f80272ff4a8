"""Results of episodes as a broken or hostile rollout service might send them: good ones with fields changed.

Trajectories are `msgspec` structs, which are not checked when they are made: any value can be put anywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from astraflow import wire
from astraflow.types import Episode, EpisodeResult, MediaRef, Stream, Trajectory, Turn, VersionSpan
from drivers.vision_models import picture

__all__ = ["hostile_results"]

NEWEST = 3
"""Versions 0 to 3 are published."""
_FLOATS = st.sampled_from(
    [
        *(0.0, -0.0, -1e-45, 1e-3, 0.5, -1.0, -20.0, -50.0, -87.9, -88.0, -88.1, -200.0, -1e6, -1e30, -3e38),
        *(float("nan"), float("inf"), float("-inf"), 1e6, 1e15, 3e38),
    ]
)
_IDS = st.sampled_from([-(2**31), -1, 0, 1, 22, 23, 24, 25, 50, 98, 99, 100, 127, 2**31 - 1])
_REWARDS = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e6, -1e6, 1.1e6, 1e39, float("nan"), float("inf")])
_TEMPERATURES = st.sampled_from([1.0, 1.0 + 5e-7, 0.0, 1e-7, 0.5, 1000.0, -1.0, float("nan"), float("inf")])
_NAMES = st.sampled_from(["teacher_logprobs", "experts", "own", "other"])
_URIS = (
    *(picture(seed) for seed in range(2)),
    picture(2, width=8, height=8, form="JPEG"),
    picture(3)[:-40],
    "data:image/png;base64,AAAA",
    "data:text/html;base64,AAAA",
    "http://127.0.0.1:1/x.png",
    "",
)


@st.composite
def good_trajectories(draw: st.DrawFn, *, streams: Sequence[str], image_id: int) -> Trajectory:
    """Of one to three turns, with these streams, and perhaps with an image."""
    turns: list[Turn] = []
    ids: list[int] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    media: list[MediaRef] = []
    if image_id and draw(st.booleans()):
        num_pieces = 1  # 24 x 16 pixels are one token of the tiny model
        media.append(MediaRef(kind="image", uri=_URIS[0], start=1))
        ids += [5, *[image_id] * num_pieces]
        mask += [0] * (1 + num_pieces)
    for _ in range(draw(st.integers(1, 3))):
        num_shown = draw(st.integers(1, 4))
        num_sampled = draw(st.integers(1, 6))
        start = len(ids) + num_shown
        ids += draw(
            st.lists(st.integers(2, 23), min_size=num_shown + num_sampled, max_size=num_shown + num_sampled)
        )
        mask += [0] * num_shown + [1] * num_sampled
        turns.append(Turn(start=start, end=start + num_sampled, reward=draw(st.floats(-1, 1))))
        spans.append(VersionSpan(start, num_sampled, draw(st.integers(0, NEWEST))))
    logprobs = [-draw(st.floats(0, 8, width=32)) * m for m in mask]
    return Trajectory(
        policy="actor",
        role="actor",
        token_ids=wire.column(ids, "int32"),
        mask=wire.column(mask, "uint8"),
        behavior_logprobs=wire.column(logprobs, "float32"),
        versions=tuple(spans),
        temperature=1.0,
        finish_reason="stop",
        turns=tuple(turns),
        reward=draw(st.floats(-1, 1)),
        streams=_good_streams(mask, streams),
        media=tuple(media),
    )


def _good_streams(mask: Sequence[int], names: Sequence[str]) -> tuple[Stream, ...]:
    streams: list[Stream] = []
    for name in names:
        if name == "experts":
            entries = np.tile(np.array([0, 1, 2, 3], "u1"), len(mask)) * np.repeat(mask, 4).astype("u1")
            streams.append(Stream(name=name, dtype="uint8", width=4, data=entries.tobytes()))
        else:
            entries = -np.array(mask, "<f4")
            streams.append(Stream(name=name, dtype="float32", data=entries.tobytes()))
    return tuple(streams)


# --- one change each ------------------------------------------------------------------------------


def _with_entry(draw: st.DrawFn, data: bytes, kind: wire.ColumnType, values: st.SearchStrategy[Any]) -> bytes:
    entries = np.frombuffer(
        data[: len(data) - len(data) % (1 if kind == "uint8" else 4)], _dtype(kind)
    ).copy()
    if len(entries):
        with np.errstate(all="ignore"):
            entries[draw(st.integers(0, len(entries) - 1))] = draw(values)
    return entries.tobytes()


def _dtype(kind: wire.ColumnType) -> str:
    return {"int32": "<i4", "float32": "<f4", "uint8": "u1"}[kind]


def _ids(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    return _replaced(item, token_ids=_with_entry(draw, item.token_ids, "int32", _IDS))


def _logprobs(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    return _replaced(item, behavior_logprobs=_with_entry(draw, item.behavior_logprobs, "float32", _FLOATS))


def _all_logprobs(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    value = draw(_FLOATS)
    sampled = np.frombuffer(item.mask, "u1").astype("<f4")
    return _replaced(item, behavior_logprobs=np.where(sampled, np.float32(value), 0).astype("<f4").tobytes())


def _mask(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    values = st.sampled_from([0, 1, 2, 255])
    return _replaced(item, mask=_with_entry(draw, item.mask, "uint8", values))


def _consistent_mask(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    """Other tokens are trained, and everything else agrees with that; the first one may be among them."""
    num = len(item.mask)
    flags = draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
    edges = np.flatnonzero(np.diff([0, *flags, 0])).tolist()
    runs = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    logprobs = -np.array(flags, "<f4")
    return _replaced(
        item,
        mask=bytes(flags),
        behavior_logprobs=logprobs.tobytes() if len(item.behavior_logprobs) == 4 * num else b"",
        versions=tuple(VersionSpan(start, end - start, NEWEST) for start, end in runs),
        turns=tuple(Turn(start=start, end=end) for start, end in runs),
    )


def _cut(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    """The end alone, down to a single token, with everything else as it was."""
    first = draw(st.integers(0, max(0, len(item.mask) - 1)))
    num = len(item.mask) - first
    return _replaced(
        item,
        token_ids=item.token_ids[4 * first :],
        mask=item.mask[first:],
        behavior_logprobs=item.behavior_logprobs[4 * first :],
        versions=tuple(
            VersionSpan(max(0, s.start - first), min(s.length, s.start + s.length - first), s.version)
            for s in item.versions
            if s.start + s.length > first
        ),
        turns=tuple(
            Turn(start=max(0, t.start - first), end=t.end - first, reward=t.reward)
            for t in item.turns
            if t.end > first
        ),
        streams=tuple(
            msgspec.structs.replace(s, data=s.data[-num * s.width * (1 if s.dtype == "uint8" else 4) :])
            for s in item.streams
        ),
    )


def _torn(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    field = draw(st.sampled_from(["token_ids", "mask", "behavior_logprobs"]))
    data = getattr(item, field)
    return _replaced(item, **{field: data[: draw(st.integers(0, len(data)))] + draw(st.binary(max_size=5))})


def _versions(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    numbers = st.sampled_from([-1, 0, NEWEST, NEWEST + 1, 2**53])
    spans = [VersionSpan(s.start, s.length, draw(numbers)) for s in item.versions]
    change = draw(st.sampled_from(["numbers", "split", "none", "longer", "twice"]))
    if change == "split" and spans and spans[0].length > 1:
        first = spans[0]
        spans[:1] = [VersionSpan(first.start, 1, 0), VersionSpan(first.start + 1, first.length - 1, 1)]
    elif change == "none":
        spans = []
    elif change == "longer" and spans:
        spans[-1] = VersionSpan(spans[-1].start, spans[-1].length + draw(st.integers(0, 3)), 0)
    elif change == "twice":
        spans += spans
    return _replaced(item, versions=tuple(spans))


def _turns(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    turns = list(item.turns)
    change = draw(st.sampled_from(["empty", "rewards", "none", "one", "beyond", "keys"]))
    num = len(item.mask)
    if change == "empty":
        turns.append(Turn(start=num, end=num, reward=draw(_REWARDS)))
        turns.insert(0, Turn(start=0, end=0))
    elif change == "rewards":
        turns = [msgspec.structs.replace(turn, reward=draw(_REWARDS)) for turn in turns]
    elif change == "none":
        turns = []
    elif change == "one":
        turns = [Turn(start=0, end=num, reward=1.0)]
    elif change == "beyond":
        turns.append(Turn(start=num + 1, end=num + 2))
    else:
        turns = [msgspec.structs.replace(turn, state_key="same") for turn in turns]
    return _replaced(item, turns=tuple(turns))


def _streams(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    dtype: Any = draw(st.sampled_from(["float32", "int32", "uint8"]))
    width = draw(st.sampled_from([1, 1, 2, 4, 8]))
    num = len(item.mask) * width + draw(st.sampled_from([0, 0, 0, 1, -1]))
    with np.errstate(all="ignore"):
        entries = np.full(
            max(0, num), draw(_FLOATS if dtype == "float32" else st.integers(0, 255)), _dtype(dtype)
        )
    stream = Stream(name=draw(_NAMES), dtype=dtype, width=width, data=entries.tobytes())
    kept = item.streams if draw(st.booleans()) else ()
    return _replaced(item, streams=(*kept, stream))


def _without_streams(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    del draw
    return _replaced(item, streams=())


def _media(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    refs = [
        MediaRef(
            kind=draw(st.sampled_from(["image", "audio"])),
            uri=draw(st.sampled_from(_URIS)),
            start=draw(st.integers(0, len(item.mask) + 1)),
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    return _replaced(item, media=tuple(refs))


def _scalars(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    field = draw(st.sampled_from(["temperature", "reward", "finish_reason", "is_fork", "policy", "role"]))
    values: dict[str, st.SearchStrategy[Any]] = {
        "temperature": _TEMPERATURES,
        "reward": _REWARDS,
        "finish_reason": st.sampled_from(["stop", "length", "abort"]),
        "is_fork": st.booleans(),
        "policy": st.sampled_from(["actor", "", "critic"]),
        "role": st.sampled_from(["actor", "", "other", "a\nb"]),
    }
    return _replaced(item, **{field: draw(values[field])})


def _long(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    """A context longer than the model's, or than a microbatch."""
    num = draw(st.sampled_from([60, 250, 256, 400]))
    return _replaced(
        item,
        token_ids=bytes(4 * num) + item.token_ids,
        mask=bytes(num) + item.mask,
        behavior_logprobs=bytes(4 * num) + item.behavior_logprobs,
        versions=tuple(VersionSpan(s.start + num, s.length, s.version) for s in item.versions),
        turns=tuple(Turn(start=t.start + num, end=t.end + num, reward=t.reward) for t in item.turns),
        streams=(),
        media=(),
    )


def _replaced(item: Trajectory, **fields: object) -> Trajectory:
    return msgspec.structs.replace(item, **fields)


CHANGES: tuple[Callable[[st.DrawFn, Trajectory], Trajectory], ...] = (
    _ids, _logprobs, _all_logprobs, _mask, _consistent_mask, _cut, _torn, _versions, _turns, _streams,
    _without_streams, _media, _scalars, _long,
)  # fmt: skip


@st.composite
def hostile_results(draw: st.DrawFn, *, streams: Sequence[str] = (), image_id: int = 0) -> EpisodeResult:
    """One episode of one or two trajectories, each with up to two fields changed.

    `streams`: those that the trainer reads. `image_id`: the token of a piece of an image; 0: the model sees
    none.
    """
    trajectories: list[Trajectory] = []
    for _ in range(draw(st.integers(1, 2))):
        item = draw(good_trajectories(streams=streams, image_id=image_id))
        for change in draw(st.lists(st.sampled_from(CHANGES), max_size=2)):
            item = change(draw, item)
        trajectories.append(item)
    episode = Episode(trajectories=tuple(trajectories), score=draw(st.sampled_from([0.0, 1.0])))
    return EpisodeResult(lease_id="0.0.0", outcome=episode)
