"""From rewards to advantages: the choice of credit functions, and how one is built from its config."""

from collections.abc import Callable, Sequence
from functools import partial

from astraflow.algorithms.config import CreditConfig
from astraflow.algorithms.gae import gae
from astraflow.algorithms.gigpo import gigpo
from astraflow.algorithms.group_relative import group_relative
from astraflow.algorithms.max_rl import max_rl
from astraflow.algorithms.opo import opo
from astraflow.algorithms.pass_at_k_credit import pass_at_k_credit
from astraflow.algorithms.reinforce_plus_plus import reinforce_plus_plus
from astraflow.algorithms.rloo import rloo
from astraflow.algorithms.role_balanced import role_balanced
from astraflow.algorithms.turn_discount import turn_discount
from astraflow.config import Use, check_args, load_attr
from astraflow.facts import GroupFacts

__all__ = ["CREDIT", "Advantages", "Credit", "make_credit"]

Advantages = Sequence[float | Sequence[float]]
"""One entry a trajectory: a number for all of its trained tokens, or one number for each of its turns."""

Credit = Callable[[GroupFacts], Advantages]


def make_credit(config: CreditConfig) -> Credit:
    """The credit function of a config. Raises: ConfigError if the user's own cannot be loaded or called
    so."""
    if not isinstance(config, Use):
        return partial(CREDIT[config.name], **config.model_dump(exclude={"name"}))
    function: Callable[..., Advantages] = load_attr(config.use, where="table.credit.use")
    check_args(function, config.args, where="table.credit.args")
    return partial(function, **config.args)


CREDIT: dict[str, Callable[..., Advantages]] = {
    "gae": gae,
    "gigpo": gigpo,
    "group_relative": group_relative,
    "max_rl": max_rl,
    "opo": opo,
    "pass_at_k": pass_at_k_credit,
    "reinforce_plus_plus": reinforce_plus_plus,
    "rloo": rloo,
    "role_balanced": role_balanced,
    "turn_discount": turn_discount,
}
"""Built-in credit functions by name."""
