"""Bounds of everything that a peer may send: one named type for each kind of field, with its reason.

`types` writes its fields with these types, and `wire.decode` enforces them: a value beyond its bound never
becomes an item. This protects the dataflow, the publisher, rollout services and trainers alike.

A bound is far above what any real run needs, and far below what would do harm: a float that overflows when it
is summed, an integer that msgpack or SQLite cannot store, a list that blocks an event loop for seconds, a
text that fills every status page. Lower and upper bounds also refuse NaN and infinity, in both encodings.

Values that are wrong only in their context (a version that was never published, a token outside the
vocabulary) are checked where the context is known.
"""

from typing import Annotated, Any

from msgspec import Meta

__all__ = [
    "MAX_ADVANTAGE",
    "MAX_BATCH_FLOAT",
    "MAX_CHUNKS",
    "MAX_ERROR_CHARS",
    "MAX_METRIC",
    "MAX_REWARD",
    "MAX_SPANS",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "Advantage",
    "BatchFloat",
    "BatchFloats",
    "Blob",
    "Bytes",
    "Count",
    "Digest",
    "Digests",
    "ErrorText",
    "JsonText",
    "Label",
    "Labels",
    "LeaseId",
    "LeaseIds",
    "Logprob",
    "LongText",
    "MetricFloat",
    "OpaqueId",
    "PeerUrl",
    "Position",
    "RelPath",
    "Reward",
    "Seconds",
    "ServiceName",
    "SignedInt",
    "Slots",
    "StopText",
    "Temperature",
    "TensorName",
    "TokenId",
    "TopP",
    "UncheckedLabel",
    "UnixSeconds",
    "Url",
    "Version",
    "Versions",
    "as_label",
    "as_number",
    "as_text",
]

_EXACT = 2**53
"""Largest whole number that a float64, and therefore every JSON reader, represents exactly."""

Count = Annotated[int, Meta(ge=0, le=_EXACT)]
"""A number that is never negative: a count, a step, an epoch, a seed or an id."""

SignedInt = Annotated[int, Meta(ge=-_EXACT, le=_EXACT)]
"""A whole number that may be negative."""

Version = Annotated[int, Meta(ge=-1, le=_EXACT)]
"""A version of a policy; -1 where there is none."""

Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""An index into a token column, which is an int32."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A token id; columns are int32."""

Slots = Annotated[int, Meta(ge=0, le=65_536)]
"""Episodes of one service at once: more than any engine batches, and few enough for one heartbeat."""

Bytes = Annotated[int, Meta(ge=0, le=2**43)]
"""Bytes of weights: 8 TiB, twice a model of 10^12 parameters in float32."""

MAX_REWARD = 1e6
"""Rewards, turn rewards and scores are within +-1e6. float32 distinguishes differences of 0.06 there. No sum
of them, or of their squares over a batch, comes near an overflow: 1e9 tokens of 1e12 give 1e21, and float32
ends at 3e38. A task with larger scores can divide them by a constant."""

MAX_METRIC = 1e15
"""Measurements are within +-1e15: enough for the tokens, bytes and microseconds of a long run."""

MAX_ADVANTAGE = 1e12
"""Advantages are within +-1e12: the discounted return of 1e6 turns with the largest reward. Their squares fit
into float32."""

MAX_BATCH_FLOAT = 1e37
"""Means, sums and sums of squares of bounded numbers over a batch; this bound fits into float32."""

Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
MetricFloat = Annotated[float, Meta(ge=-MAX_METRIC, le=MAX_METRIC)]
Advantage = Annotated[float, Meta(ge=-MAX_ADVANTAGE, le=MAX_ADVANTAGE)]
BatchFloat = Annotated[float, Meta(ge=-MAX_BATCH_FLOAT, le=MAX_BATCH_FLOAT)]

Logprob = Annotated[float, Meta(ge=-1e6, le=1.0)]
"""In nats. At most 0, except for the rounding of a sum over the vocabulary."""

Temperature = Annotated[float, Meta(ge=0.0, le=1000.0)]
"""0 is greedy; at 1000 every token is as likely as any other."""

TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
"""A share of probability."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A length of time: up to 30 years."""

UnixSeconds = Annotated[float, Meta(ge=0.0, le=1e11)]
"""A moment, in seconds since 1970: up to the year 5138."""

_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$(?!\n)"
"""Matches texts without control characters, for names that terminals, logs and metric labels show."""

ServiceName = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)")]
"""A service's name: part of ids, metric labels and file names."""

_MAX_LABEL = 200

Label = Annotated[str, Meta(max_length=_MAX_LABEL, pattern=_PRINTABLE)]
"""A name for people: of a policy, role, engine, metric, kind of span, error class or task source."""


def as_label(text: str) -> str:
    """Converts any text to a `Label`: control characters become spaces, and long texts are cut.

    Use it for texts from elsewhere, such as error messages. Sent unchanged, they might be refused.
    """
    visible = "".join(char if char.isprintable() else " " for char in text)
    return visible if len(visible) <= _MAX_LABEL else visible[: _MAX_LABEL - 3] + "..."


def as_number(value: Any) -> float | None:
    """The number that code of a user's returned, such as a tensor with one element; None for other values.

    A text is not a number, even if `float` would read one from it.
    """
    try:
        plain = value.item() if hasattr(value, "item") else value  # numpy and torch
        return None if isinstance(plain, str | bytes | bytearray) else float(plain)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # torch raises the last one
        return None


def as_text(text: str) -> str:
    """The text, with a replacement character for each half of a surrogate pair, which can't be encoded.

    Such halves come from file names, from truncated texts, and from JSON of other programs.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


UncheckedLabel = Annotated[str, Meta(max_length=_MAX_LABEL)]
"""A `Label` in items that arrive thousands of times per second, where a pattern would double the time of
decoding. The code that accepts such an item checks the characters."""

OpaqueId = Annotated[str, Meta(max_length=1024)]
"""An opaque id of a task or worker; long enough for a URL."""

LeaseId = Annotated[str, Meta(max_length=64)]
"""`GROUP.EPISODE.ATTEMPT`, three numbers of up to 18 digits each."""

Digest = Annotated[str, Meta(max_length=128)]
"""A hash of up to 512 bits in hex; may be empty."""

Url = Annotated[str, Meta(max_length=2048)]
"""A URL, as long as common servers accept."""

PeerUrl = Annotated[str, Meta(max_length=300)]
"""`http://HOST:PORT`."""

MAX_ERROR_CHARS = 65_536

ErrorText = Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
"""Why something failed, in words: an error message with its traceback."""

RelPath = Annotated[str, Meta(max_length=4096)]
"""A file, relative to a folder that both sides know; as long as Linux allows."""

TensorName = Annotated[str, Meta(max_length=512, pattern=_PRINTABLE)]
"""The Hugging Face name of a parameter of a model."""

StopText = Annotated[str, Meta(max_length=1000)]
"""A text that ends a completion; may contain line ends."""

LongText = Annotated[str, Meta(max_length=4 * 1024 * 1024)]
"""A prompt, an answer or a message of a conversation: about a million tokens."""

JsonText = Annotated[str, Meta(max_length=4 * 1024 * 1024)]
"""A document inside an item, as JSON text."""

Blob = Annotated[bytes, Meta(max_length=64 * 1024 * 1024)]
"""A token column: 16 million tokens of 4 bytes. How long the trajectories of a policy may be is checked where
the policy is known."""

MAX_TOKENS = 2**24
"""Largest number of tokens in one request to an engine."""

MAX_SPANS = 10_000
"""Largest number of busy spans in one message: one per 0.2 ms of a heartbeat's 2 s."""

MAX_TENSORS = 2**18
"""Largest number of tensors in a version: 61 layers of 256 experts with their scales have 100,000."""

MAX_CHUNKS = 2**19
"""Largest number of chunks of a version: 8 TiB in chunks of 16 MiB."""

LeaseIds = Annotated[tuple[LeaseId, ...], Meta(max_length=65_536)]
"""All leases of one service, as many as `Slots`."""

Versions = Annotated[tuple[Version, ...], Meta(max_length=65_536)]
"""Several versions of a policy."""

Labels = Annotated[
    dict[Label, Annotated[str, Meta(max_length=1000, pattern=_PRINTABLE)]], Meta(max_length=64)
]
"""Key-value labels that an operator gives to a service."""

Digests = Annotated[dict[Label, Digest], Meta(max_length=1024)]
"""Policy -> digest."""

BatchFloats = Annotated[dict[Label, BatchFloat], Meta(max_length=1024)]
"""Policy -> figure."""
