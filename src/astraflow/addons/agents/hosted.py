"""The workflow `hosted`: an environment with a separate Python plays the episode, through an endpoint.

The host gets the episode's own address and key, and a model for each of its roles. So everything that it
samples is recorded exactly, as for any agent program. It returns a reward for each run of an agent.
"""

from collections.abc import Mapping, Sequence

import msgspec

from astraflow.addons.agents.agent import add_endpoint_metrics
from astraflow.addons.agents.config import HostedConfig
from astraflow.addons.agents.hosts.host import Host
from astraflow.addons.agents.hosts.messages import EpisodeEnd, HostedSpec, RunRequest, RunReward
from astraflow.errors import ConfigError, RolloutError
from astraflow.user_input.mistakes import hint
from astraflow.workflows.calls import ParserOrName
from astraflow.workflows.conversation import Endpoint, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import name_at

__all__ = ["HostedWorkflow", "check_roles", "players"]


class HostedWorkflow:
    """Implements `Workflow` and `OpenWorkflow`.

    The conversations of each part of the episode get the part's reward. A conversation that the host doesn't
    mention, or declares as not trained, is left out of training.
    """

    def __init__(self, config: HostedConfig, parser: ParserOrName, host: Host | None = None) -> None:
        """`host`: None makes one from the config."""
        self._config = config
        self._parser = parser
        self._host = host or Host(config)

    async def open(self) -> None:
        """Starts the host. Raises: ConfigError if it cannot be started, or a role has no policy."""
        library = await self._host.open()
        check_roles(self._config.roles, library.roles)

    async def close(self) -> None:
        """Ends the host and everything that it started."""
        await self._host.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Runs one episode. Raises: RolloutError; ConfigError if a role has no policy."""
        library = await self._host.open()
        roles = players(self._config.roles, library.roles, tuple(policies))
        num_restarts = self._host.num_restarts
        async with policies.endpoint(parser=self._parser, roles=roles) as endpoint:
            end = await self._host.run(
                RunRequest(
                    task=task.id,
                    data=_data_of(task),
                    base_url=endpoint.base_url,
                    api_key=endpoint.api_key,
                    models={role: role for role in roles},
                    deadline_s=self._config.timeout_s,
                )
            )
        rewards = _rewards(end, endpoint)
        rewards.add_metric("host_restarts", float(num_restarts), "max")
        add_endpoint_metrics(rewards, endpoint)
        return rewards


def check_roles(given: Mapping[str, str], roles: Sequence[str]) -> None:
    """Checks that a recipe with `roles` names a policy for each role of the host, and for no other role.

    Raises: ConfigError.
    """
    for role in given:
        if role not in roles:
            raise ConfigError(
                f"workflow.roles.{role}: the host does not have this role{hint(role, list(roles))} "
                f"(roles: {', '.join(roles)})"
            )
    missing = [role for role in roles if given and role not in given]
    if missing:
        raise ConfigError(
            f"workflow.roles names no policy for the role {missing[0]!r} of the host; add "
            f"`{missing[0]}: POLICY`, or leave `roles` out, so that the policies play in their order"
        )


def players(given: Mapping[str, str], roles: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Role -> policy. By default, the policies play the roles in order, and the last one plays the rest."""
    check_roles(given, roles)
    return {role: name_at(names, given.get(role, ""), place) for place, role in enumerate(roles)}


def _data_of(task: ScoredTask) -> msgspec.Raw:
    try:
        return msgspec.json.decode(task.spec, type=HostedSpec).data
    except msgspec.DecodeError as err:
        raise RolloutError(
            f"task {task.id} is not from a hosted source, so no host can run it; use a source "
            "{name: hosted}",
            is_retryable=False,
        ) from err


def _rewards(end: EpisodeEnd, endpoint: Endpoint) -> Rewards:
    """Assigns the rewards of the parts to their conversations.

    Raises: RolloutError if no policy sampled anything, or a part is listed twice.
    """
    if endpoint.num_completions == 0:
        refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
        raise RolloutError(
            "the host got no completion of a policy of this run; it must use the base URL, the key, and the "
            f"models that it is given{refused}",
            is_retryable=False,
        )
    parts: dict[tuple[str, str], RunReward] = {}
    for part in end.parts:
        if (part.role, part.session) in parts:
            raise RolloutError(
                f"the host rewarded the role {part.role!r} twice (session {part.session!r}); each run of a "
                "role needs its own session, which its requests name in X-Session-ID",
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
    rewards.set_score(end.score)
    for name, value in end.metrics.items():
        rewards.add_metric(f"host/{name}"[:200], value)
    return rewards
