"""Custom data algorithms: a curator, a filter, and a credit function."""

from astraflow.types.facts import GroupFacts, Outcome


def long_enough(facts: GroupFacts, *, least: int) -> bool | str:
    """Filter: drops groups with short trajectories."""
    mean = sum(t.num_trained_tokens for t in facts.trajectories) / len(facts.trajectories)
    return mean >= least or f"{mean:.0f} tokens on average"


def best_only(facts: GroupFacts) -> list[float]:
    """Credit: the advantage is how far a reward exceeds that of the second-best episode."""
    best = {}  # per episode, because an episode with forks has several trajectories
    for t in facts.trajectories:
        best[t.episode_idx] = max(t.reward, best.get(t.episode_idx, t.reward))
    rewards = sorted(best.values())
    return [max(0.0, t.reward - rewards[-2]) for t in facts.trajectories]


class Rest:
    """Curator: skips a task for the next `pause` groups after a draw of it."""

    def __init__(self, *, num_tasks: int, seed: int, pause: int) -> None:
        self.pause, self.num_groups, self.last = pause, 0, {}

    def why_skip(self, task_idx: int) -> str:
        return "resting" if self.num_groups - self.last.get(task_idx, -self.pause) < self.pause else ""

    def observe(self, outcome: Outcome) -> None:
        self.num_groups += 1
        self.last[outcome.task_idx] = self.num_groups

    def state(self) -> dict:
        return {"num_groups": self.num_groups, "last": self.last}

    def restore(self, state: dict) -> None:
        self.num_groups, self.last = state["num_groups"], dict(state["last"])
