"""Every exception that AstraFlow raises on purpose.

    Error
    +-- ConfigError (ValueError)          the recipe or a command-line value is wrong; the user must fix it
    +-- DataError (ValueError)            a task file, model folder or saved run is damaged or missing
    +-- ComponentError                    a user's component raised an error, or broke its contract
    +-- WireError (ValueError)            a message is malformed, too large, or inconsistent
    |   +-- VersionMismatchError          the peer uses another protocol version
    |   +-- BoundError                    a value in a message is out of bounds
    |   +-- TooLargeError                 a body has more bytes than its receiver reads
    +-- RefusedError                      a service understood the request and refused it; has a `code`
    |   +-- FencedError                   a newer session of the same trainer exists; the caller must stop
    +-- UnavailableError (ConnectionError) a service did not respond within the retries
    +-- DeadlineError (TimeoutError)      an awaited event did not happen in time
    +-- JournalError (OSError)            the journal cannot be written or read back
    +-- WeightsError (ValueError)         a version failed verification or does not fit the model
    |   +-- UnfitVersionError             its tensors can't be this model's weights, so a retry can't help
    +-- RolloutError                      one episode failed; `is_retryable` says whether a retry may help
    |   +-- LateScoreError                scoring a completion took too long; says nothing about the answer
    |   +-- ScorerError                   a built-in scorer failed; says nothing about the answer
    +-- ImageError (ValueError)           an image cannot be shown to a model; reported to its sender
    +-- QueryError (ValueError)           a query cannot be searched for; reported to its sender, e.g. a model
    +-- SandboxError                      a sandbox for a model's program failed to start, or failed
    +-- HistoryRewrittenError             a chat template does not extend the sampled text; the episode forks
    +-- ServiceError (RuntimeError)       a supervised process failed permanently; names its log
    +-- ShapeError (ValueError)           arrays or tensors that belong together differ in length
    +-- TrainingError (ArithmeticError)   a loss or gradient is not finite; names the groups

Messages say what failed, the value, what was expected, and what to do next.
"""

from collections.abc import Sequence

__all__ = [
    "BoundError",
    "ComponentError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "Error",
    "FencedError",
    "HistoryRewrittenError",
    "ImageError",
    "JournalError",
    "LateScoreError",
    "QueryError",
    "RefusedError",
    "RolloutError",
    "SandboxError",
    "ScorerError",
    "ServiceError",
    "ShapeError",
    "TooLargeError",
    "TrainingError",
    "UnavailableError",
    "UnfitVersionError",
    "VersionMismatchError",
    "WeightsError",
    "WireError",
]


class Error(Exception):
    """Root of the tree; `except Error` catches everything that AstraFlow raises on purpose."""


class ConfigError(Error, ValueError):
    """A recipe or a command-line value is wrong; `mistakes` are the parts of a message about several."""

    def __init__(self, message: str, *, mistakes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.mistakes = tuple(mistakes)


class DataError(Error, ValueError):
    """A task file, a model folder or a saved run is damaged or missing."""


class ComponentError(Error):
    """A component named in the recipe, such as a curator or a sampler, raised an error or broke its
    contract."""


class WireError(Error, ValueError):
    """A message is malformed, too large, or inconsistent."""


class VersionMismatchError(WireError):
    """The peer uses another version of the protocol."""


class TooLargeError(WireError):
    """A body has more bytes than its receiver reads."""


class BoundError(WireError):
    """A value in a message has the right type but is out of bounds; the error names the value and the
    bound."""


class RefusedError(Error):
    """A service understood the request and refused it; `code` is a stable, machine-readable word."""

    def __init__(self, message: str, *, code: str = "refused", status: int = 409) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class FencedError(RefusedError):
    """A newer session of the same trainer has the policy; this session must stop."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="fenced", status=409)


class UnavailableError(Error, ConnectionError):
    """A service did not respond within the retries."""


class DeadlineError(Error, TimeoutError):
    """An awaited event did not happen in time."""


class JournalError(Error, OSError):
    """The journal cannot be written or read back."""


class WeightsError(Error, ValueError):
    """A version failed verification or does not fit the model."""


class UnfitVersionError(WeightsError):
    """The tensors of a version can't be the weights of its model: names or shapes are wrong, or a value is
    not finite. Trying again can't help."""


class RolloutError(Error):
    """One episode failed. The failure is recorded as data, and never becomes a reward of 0."""

    def __init__(self, message: str, *, is_retryable: bool = True) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable


class LateScoreError(RolloutError):
    """Scoring one completion took too long. The machine may have been busy, so another attempt may help."""


class ScorerError(RolloutError):
    """A built-in scorer failed. Its process is replaced, so another attempt may help."""


class ImageError(Error, ValueError):
    """An image is not a PNG or JPEG file, is too large, or does not match its tokens."""


class QueryError(Error, ValueError):
    """A query cannot be searched for; the message is for its sender, e.g. a model."""


class SandboxError(Error):
    """A sandbox failed. This says nothing about the program, so a retry may succeed."""


class HistoryRewrittenError(Error):
    """A chat template renders an earlier turn differently once messages follow. The recorder then forks."""


class ServiceError(Error, RuntimeError):
    """A supervised process failed permanently; the message names its log and its last lines."""


class ShapeError(Error, ValueError):
    """Arrays or tensors that belong together differ in length."""


class TrainingError(Error, ArithmeticError):
    """A loss or gradient is not finite; the message names the groups."""
