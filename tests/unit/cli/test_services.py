"""Which errors of a service's process end it for good."""

from astraflow.cli.services import is_final
from astraflow.errors import ConfigError, FencedError, RefusedError, UnavailableError


def test_a_fenced_trainer_may_start_again_and_wrong_settings_may_not() -> None:
    assert not is_final(FencedError("session 1 is over, session 2 holds the policy"))
    assert not is_final(UnavailableError("no answer"))
    assert is_final(RefusedError("this service does not fit the run"))
    assert is_final(ConfigError("no such policy"))
