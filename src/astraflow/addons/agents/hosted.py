"""The workflow `hosted`: an environment in a Python of its own plays the episode, through an endpoint.

The host gets the episode's own address and key, and a model for each of its roles; so all that it samples is
recorded exactly, as for any agent program. It answers with what each run of an agent was worth.
"""

from collections.abc import Mapping, Sequence

import msgspec

from astraflow.addons.agents.config import HostedConfig
from astraflow.addons.agents.hosts.host import Host
from astraflow.addons.agents.hosts.messages import Ended, HostedSpec, Part, RunRequest
from astraflow.errors import ConfigError, RolloutError
from astraflow.user_input.mistakes import hint
from astraflow.workflows.calls import CallParser
from astraflow.workflows.conversation import Endpoint, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import name_at

__all__ = ["Hosted", "check_roles", "players"]


class Hosted:
    """Implements `Workflow` and `OpenWorkflow`.

    Rewarded: the conversations of each part of the episode, with the part's reward. A conversation of which
    the host says nothing, or says that it is not to be trained, is left out of training.
    """

    def __init__(self, config: HostedConfig, parser: CallParser, host: Host | None = None) -> None:
        """`host`: None for one of the config's."""
        self._config = config
        self._parser = parser
        self._host = host or Host(config)

    async def open(self) -> None:
        """Starts the host. Raises: ConfigError if it cannot be started, or a role has no policy."""
        opened = await self._host.open()
        check_roles(self._config.roles, opened.roles)

    async def close(self) -> None:
        """Ends the host with everything that it started."""
        await self._host.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Runs one episode. Raises: RolloutError; ConfigError if a role has no policy."""
        opened = await self._host.open()
        roles = players(self._config.roles, opened.roles, tuple(policies))
        num_restarts = self._host.num_restarts
        async with policies.endpoint(parser=self._parser, roles=roles) as endpoint:
            ended = await self._host.run(
                RunRequest(
                    task=task.id,
                    data=_data_of(task),
                    base_url=endpoint.base_url,
                    api_key=endpoint.api_key,
                    models={role: role for role in roles},
                    deadline_s=self._config.timeout_s,
                )
            )
        rewards = _rewards(ended, endpoint)
        rewards.add_metric("host_restarts", float(num_restarts), "max")
        if endpoint.ignored_overrides_frac is not None:
            rewards.add_metric("ignored_overrides_frac", endpoint.ignored_overrides_frac)
        return rewards


def check_roles(given: Mapping[str, str], roles: Sequence[str]) -> None:
    """Checks that a recipe that names players names one for each role of the host, and no other.

    Raises: ConfigError.
    """
    for role in given:
        if role not in roles:
            raise ConfigError(
                f"workflow.roles.{role}: the host has no such role{hint(role, list(roles))} "
                f"(roles: {', '.join(roles)})"
            )
    missing = [role for role in roles if given and role not in given]
    if missing:
        raise ConfigError(
            f"workflow.roles names no policy for the role {missing[0]!r} of the host; add "
            f"`{missing[0]}: POLICY`, or leave `roles` out, so that the policies play in their order"
        )


def players(given: Mapping[str, str], roles: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Role -> policy. Without a word in the recipe, the policies play the roles in their order, and the last
    one plays those that are left."""
    check_roles(given, roles)
    return {role: name_at(names, given.get(role, ""), place) for place, role in enumerate(roles)}


def _data_of(task: ScoredTask) -> msgspec.Raw:
    try:
        return msgspec.json.decode(task.spec, type=HostedSpec).data
    except msgspec.DecodeError as err:
        raise RolloutError(
            f"task {task.id} is of no hosted source, so no host can run it; use a source {{name: hosted}}",
            is_retryable=False,
        ) from err


def _rewards(ended: Ended, endpoint: Endpoint) -> Rewards:
    """Puts the rewards of the parts to the conversations that they were held in.

    Raises: RolloutError if no policy was asked anything, or a part is told twice.
    """
    if endpoint.num_completions == 0:
        refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
        raise RolloutError(
            "the host got no completion of a policy of this run; it must use the base URL, the key and the "
            f"models that it is given{refused}",
            is_retryable=False,
        )
    parts: dict[tuple[str, str], Part] = {}
    for part in ended.parts:
        if (part.role, part.session) in parts:
            raise RolloutError(
                f"the host rewarded the role {part.role!r} twice (session {part.session!r}); the runs of one "
                "role need sessions of their own, which their requests name in X-Session-ID",
                is_retryable=False,
            )
        parts[part.role, part.session] = part
    rewards = Rewards()
    for held in endpoint.conversations:
        part = parts.get((held.role, held.session)) or parts.get((held.role, ""))
        if part is None or not part.is_trained:
            rewards.leave_out(held.conversation)
        else:
            rewards.add(held.conversation, part.reward)
    rewards.set_score(ended.score)
    for name, value in ended.metrics.items():
        rewards.add_metric(f"host/{name}"[:200], value)
    return rewards
