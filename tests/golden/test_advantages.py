"""Advantages, shaped rewards and normalised batches against numbers worked by hand."""

import dataclasses
import math
from dataclasses import replace

import pytest

from astraflow.algorithms.credit import (
    GdpoCredit,
    GroupRelativeCredit,
    HierarchicalCredit,
    MaxRlCredit,
    OpoCredit,
    PassAtKCredit,
    RaeCredit,
    ReinforcePlusPlusCredit,
    RlooCredit,
    RoleBalancedCredit,
)
from astraflow.algorithms.group_statistics import group_mean
from astraflow.algorithms.shaping import LengthShaping, OverlongShaping
from astraflow.algorithms.task_gates import mean_reward
from astraflow.algorithms.turn_credit import GigpoCredit, TurnDiscountCredit
from astraflow.dataflow.core.commands import PayloadRef, SampleView
from astraflow.dataflow.core.state import ReadyGroup
from astraflow.dataflow.core.tables import normalize_advantages
from astraflow.errors import DataError
from astraflow.types.facts import GroupFacts, TrajectoryFacts


def make_group(*rewards: float, roles: tuple[str, ...] = ()) -> GroupFacts:
    """One trajectory a reward; all of role `actor` unless roles are given."""
    return GroupFacts(
        policy="actor",
        group_id=0,
        trajectories=tuple(
            TrajectoryFacts(
                episode_idx=idx,
                role=roles[idx] if roles else "actor",
                reward=reward,
                turn_rewards=(reward,),
                turn_spans=((0, 1),),
                num_tokens=1,
                num_trained_tokens=1,
                is_truncated=False,
            )
            for idx, reward in enumerate(rewards)
        ),
    )


def test_one_right_of_four_divides_by_the_sample_deviation():
    # mean 1/4; squares 9/16 + 3 * 1/16 = 3/4; variance (n - 1) 1/4; deviation 1/2.
    advantages = GroupRelativeCredit(scale="std", epsilon=1e-12)(make_group(1.0, 0.0, 0.0, 0.0))
    assert advantages == pytest.approx((1.5, -0.5, -0.5, -0.5))


def test_two_of_two_differ_by_the_root_of_two():
    # mean 1/2; variance (n - 1) 1/2; 0.5 / sqrt(0.5) = sqrt(0.5).
    advantages = GroupRelativeCredit(scale="std", epsilon=1e-12)(make_group(1.0, 0.0))
    assert advantages == pytest.approx((0.7071067811865476, -0.7071067811865476))


def test_epsilon_is_added_to_the_deviation():
    # 0.5 / (sqrt(0.5) + 0.5) = 0.41421...
    assert GroupRelativeCredit(epsilon=0.5)(make_group(1.0, 0.0))[0] == pytest.approx(0.41421356237)


def test_unscaled_advantages_are_the_distance_from_the_mean():
    assert GroupRelativeCredit(scale="none")(make_group(3.0, 1.0, 2.0, -2.0)) == pytest.approx(
        (2.0, 0.0, 1.0, -3.0)
    )


def test_equal_rewards_give_no_advantage():
    assert GroupRelativeCredit()(make_group(1.0, 1.0, 1.0)) == (0.0, 0.0, 0.0)


def test_roles_are_compared_with_themselves_only():
    # solver: rewards 1 and 0; verifier: rewards 10 and 20, deviation sqrt(50).
    group = make_group(1.0, 10.0, 0.0, 20.0, roles=("solver", "verifier", "solver", "verifier"))
    root = 0.7071067811865476
    assert GroupRelativeCredit(epsilon=1e-12)(group) == pytest.approx((root, -root, -root, root))


def test_a_role_with_one_trajectory_has_nothing_to_compare_with():
    group = make_group(1.0, 0.0, 7.0, roles=("solver", "solver", "judge"))
    assert GroupRelativeCredit(scale="none")(group) == pytest.approx((0.5, -0.5, 0.0))


def test_the_population_deviation_divides_by_n():
    # mean 1/4, mean square 3/16, deviation sqrt(3)/4: 3/4 over it is sqrt(3).
    advantages = GroupRelativeCredit(scale="population_std", epsilon=1e-12)(make_group(1.0, 0.0, 0.0, 0.0))
    assert advantages == pytest.approx((3**0.5, *(-(3**-0.5),) * 3))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 1 - 0; 0 - 1/3 three times.
    assert RlooCredit()(make_group(1.0, 0.0, 0.0, 0.0)) == pytest.approx((1.0, -1 / 3, -1 / 3, -1 / 3))
    group = make_group(1.0, 5.0, 0.0, roles=("solver", "judge", "solver"))
    assert RlooCredit()(group) == pytest.approx((1.0, 0.0, -1.0))


def test_balanced_roles_weigh_alike_however_frequent_they_are():
    # Role a: rewards 1, 1, 0, mean 2/3; role b: 0; balanced mean 1/3. Weights 4 / (2 * 3) and 4 / 2.
    group = make_group(1.0, 1.0, 0.0, 0.0, roles=("a", "a", "b", "a"))
    expected = (4 / 9, 4 / 9, -2 / 3, -2 / 9)
    assert RoleBalancedCredit(roles=("a", "b"))(group) == pytest.approx(expected)
    # One that always approves is right on all of a and wrong on all of b, and gains nothing from more of a.
    group = make_group(1.0, 1.0, 1.0, 0.0, roles=("a", "a", "a", "b"))
    advantages = RoleBalancedCredit(roles=("a", "b"))(group)
    assert advantages == pytest.approx((1 / 3, 1 / 3, 1 / 3, -1.0))
    assert sum(advantages) == pytest.approx(0.0)


def test_a_group_without_one_of_the_balanced_roles_says_nothing_of_them():
    group = make_group(1.0, 0.0, 3.0, 1.0, roles=("a", "a", "judge", "judge"))
    assert RoleBalancedCredit(roles=("a", "b"))(group) == (0.0, 0.0, 1.0, -1.0)


def test_max_rl_divides_by_the_pass_rate():
    # mean 1/4: (1 - 1/4) / (1/4) = 3, -1/4 / (1/4) = -1; nothing where nobody is right.
    assert MaxRlCredit(epsilon=1e-12)(make_group(1.0, 0.0, 0.0, 0.0)) == pytest.approx(
        (3.0, -1.0, -1.0, -1.0)
    )
    assert MaxRlCredit()(make_group(1.0, 1.0)) == (0.0, 0.0)
    assert MaxRlCredit()(make_group(0.0, 0.0)) == (0.0, 0.0)


def test_reinforce_plus_plus_leaves_normalising_to_the_batch():
    assert ReinforcePlusPlusCredit()(make_group(1.0, 0.0)) == (1.0, 0.0)
    assert ReinforcePlusPlusCredit(baseline="group")(make_group(1.0, 0.0)) == (0.5, -0.5)


def make_forked(reward: float, num_tokens: tuple[int, ...], *others: float) -> GroupFacts:
    """An episode in as many forks as there are numbers of tokens, each with the whole reward, and others."""
    whole, *rest = make_group(reward, *others).trajectories
    forks = [dataclasses.replace(whole, num_trained_tokens=num, state_keys=(7,)) for num in num_tokens]
    return GroupFacts("actor", 0, (*forks, *(dataclasses.replace(t, state_keys=(7,)) for t in rest)))


def test_the_trajectories_of_a_forked_episode_share_its_weight():
    group = make_forked(1.0, (1, 2, 2, 5), 0.0, 0.0, 0.0)
    assert group.weights == (0.1, 0.2, 0.2, 0.5, 1.0, 1.0, 1.0)
    without_tokens = make_forked(1.0, (0, 0), 0.0)
    assert without_tokens.weights == (0.5, 0.5, 1.0)


def test_an_episode_that_forks_weighs_no_more_than_the_others():
    # One right of four, in four forks: mean 1/4, deviation 1/2, baseline of the right one 0.
    group = make_forked(1.0, (1, 2, 2, 5), 0.0, 0.0, 0.0)
    forked = (1.5,) * 4 + (-0.5,) * 3
    assert GroupRelativeCredit(epsilon=1e-12)(group) == pytest.approx(forked)
    assert GroupRelativeCredit(scale="none")(group) == pytest.approx((0.75,) * 4 + (-0.25,) * 3)
    population = GroupRelativeCredit(scale="population_std", epsilon=1e-12)(group)
    assert population == pytest.approx((3**0.5,) * 4 + (-(3**-0.5),) * 3)
    assert RlooCredit()(group) == pytest.approx((1.0,) * 4 + (-1 / 3,) * 3)
    assert MaxRlCredit(epsilon=1e-12)(group) == pytest.approx((3.0,) * 4 + (-1.0,) * 3)
    assert ReinforcePlusPlusCredit(baseline="group")(group) == pytest.approx((0.75,) * 4 + (-0.25,) * 3)
    turns = TurnDiscountCredit(epsilon=1e-12)(group)
    assert [a for (a,) in turns] == pytest.approx(forked)
    # All saw state 7, so the comparison of turns gives the same once more.
    steps = GigpoCredit(step_weight=1.0, epsilon=1e-12)(group)
    assert [a for (a,) in steps] == pytest.approx([2 * a for a in forked])
    assert group_mean(group) == 0.25
    assert mean_reward(group) == 0.25


def test_different_rewards_within_an_episode_count_by_their_tokens():
    # The first episode is worth (1 * 3 + 0 * 1) / 4 = 3/4, the second 1/4: mean 1/2.
    first, second, third = make_group(1.0, 0.0, 0.25).trajectories
    first = dataclasses.replace(first, num_trained_tokens=3)
    second = dataclasses.replace(second, episode_idx=0)
    group = GroupFacts("actor", 0, (first, second, third))
    assert GroupRelativeCredit(scale="none")(group) == pytest.approx((0.5, -0.5, -0.25))
    # Over n - 1 = 1: 3/4 * 1/4 + 1/4 * 1/4 + 1/16 = 5/16.
    scaled = GroupRelativeCredit(epsilon=1e-12)(group)
    assert scaled == pytest.approx([a / (5 / 16) ** 0.5 for a in (0.5, -0.5, -0.25)])
    assert RlooCredit()(group) == pytest.approx((0.75, -0.25, -0.5))


def test_a_role_in_a_single_episode_compares_its_trajectories():
    first, second = make_group(1.0, 0.0).trajectories
    group = GroupFacts("actor", 0, (first, dataclasses.replace(second, episode_idx=0)))
    assert RlooCredit()(group) == pytest.approx((1.0, -1.0))
    assert GroupRelativeCredit(scale="none")(group) == pytest.approx((0.5, -0.5))


def test_pass_at_k_pays_for_what_a_set_of_answers_gains() -> None:
    # Two of four right, sets of two: one in six has none right. m = 5/6, s = sqrt(5) / 6.
    group = make_group(1.0, 1.0, 0.0, 0.0)
    s = 5**0.5 / 6
    wrong = (1 / 6 - 1 / 3) / s
    expected = (1 / 6 / s, 1 / 6 / s, wrong, wrong)
    assert PassAtKCredit(k=2, epsilon=1e-12)(group) == pytest.approx(expected)
    # k = 1 is the distance from the pass rate over its deviation.
    assert PassAtKCredit(k=1, epsilon=1e-12)(group) == pytest.approx((1.0, 1.0, -1.0, -1.0))
    # Every set of three has a right one, and no set of five is there.
    assert PassAtKCredit(k=3)(group) == PassAtKCredit(k=5)(group) == (0.0,) * 4
    forked = make_forked(1.0, (1, 2, 5), 0.0, 0.0, 0.0)
    assert PassAtKCredit(epsilon=1e-12)(forked) == pytest.approx((1.0,) * 3 + (-1 / 3,) * 3)


def test_the_optimal_baseline_weighs_rewards_by_length() -> None:
    group = make_lengths((1.0, 30), (0.0, 10))
    assert OpoCredit()(group) == pytest.approx((0.25, -0.75))
    assert OpoCredit()(make_lengths((1.0, 30))) == (0.0,)


def test_balanced_roles_count_episodes_not_forks():
    # As above with rewards 1, 1, 0 of role a and 0 of role b; the first episode in two forks.
    group = make_group(1.0, 1.0, 1.0, 0.0, 0.0, roles=("a", "a", "a", "b", "a"))
    first, fork, *rest = group.trajectories
    fork = dataclasses.replace(fork, episode_idx=0)
    group = GroupFacts("actor", 0, (first, fork, *rest))
    expected = (4 / 9, 4 / 9, 4 / 9, -2 / 3, -2 / 9)
    assert RoleBalancedCredit(roles=("a", "b"))(group) == pytest.approx(expected)


def make_turns(*turns: tuple[tuple[float, ...], tuple[int, ...]], extra: float = 0.0) -> GroupFacts:
    """One trajectory each of (turn rewards, state keys); `extra` is rewarded to the whole of each."""
    return GroupFacts(
        policy="actor",
        group_id=0,
        trajectories=tuple(
            TrajectoryFacts(
                episode_idx=idx,
                role="actor",
                reward=sum(rewards) + extra,
                turn_rewards=rewards,
                turn_spans=((0, 1),) * len(rewards),
                num_tokens=9,
                num_trained_tokens=1,
                is_truncated=False,
                state_keys=keys,
            )
            for idx, (rewards, keys) in enumerate(turns)
        ),
    )


def test_turns_are_credited_with_what_followed_them():
    # Returns at discount 1/2: 0 + 1/2 = 1/2, 1; 0. Mean 1/2.
    group = make_turns(((0.0, 1.0), ()), ((0.0,), ()))
    first, second = TurnDiscountCredit(discount=0.5, scale="none")(group)
    assert (*first, *second) == pytest.approx((0.0, 0.5, -0.5))


def test_a_reward_of_the_whole_trajectory_counts_for_its_last_turn():
    # Returns 1/2 and 1 for the first, 1 for the second; mean 5/6.
    group = make_turns(((0.0, 0.0), ()), ((0.0,), ()), extra=1.0)
    first, second = TurnDiscountCredit(discount=0.5, scale="none")(group)
    assert (*first, *second) == pytest.approx((-1 / 3, 1 / 6, 1 / 6))


def test_gigpo_adds_the_comparison_of_turns_that_saw_the_same_state():
    # Episodes: rewards 1 and 0, so +1/2 and -1/2. States: 7 is seen by both (returns 1/2 and 0, mean 1/4:
    # +1/4 and -1/4); 8 and 9 by one each, which says nothing.
    group = make_turns(((0.0, 1.0), (7, 8)), ((0.0, 0.0), (7, 9)))
    first, second = GigpoCredit(discount=0.5, step_weight=2.0, scale="none")(group)
    assert (*first, *second) == pytest.approx((1.0, 0.5, -1.0, -0.5))


def make_lengths(*pairs: tuple[float, int]) -> GroupFacts:
    """One trajectory each of (reward, trained tokens)."""
    group = make_group(*(reward for reward, _ in pairs))
    changed = zip(group.trajectories, pairs, strict=True)
    return GroupFacts(
        "actor", 0, tuple(dataclasses.replace(t, num_trained_tokens=n) for t, (_, n) in changed)
    )


def test_overlong_punishes_linearly_within_the_cache():
    group = make_lengths((1.0, 60), (1.0, 80), (0.0, 90), (1.0, 100), (1.0, 500))
    shaped = OverlongShaping(max_tokens=100, cache_tokens=40)(group)
    assert shaped == pytest.approx((1.0, 0.5, -0.75, 0.0, 0.0))


def test_the_length_reward_prefers_the_short_ones_and_never_rewards_the_wrong():
    # Lengths 10 to 30: 1/2, 0, -1/2; the wrong ones keep only the malus.
    group = make_lengths((1.0, 10), (1.0, 30), (0.0, 10), (0.0, 30), (1.0, 20))
    assert LengthShaping(weight=0.2)(group) == pytest.approx((1.1, 0.9, 0.0, -0.1, 1.0))
    assert LengthShaping()(make_lengths((1.0, 5), (0.0, 5))) == (1.0, 0.0)


def test_the_length_of_an_episode_is_that_of_all_its_forks():
    # 10 + 20, 10 and 20 tokens: the forked one is the longest.
    first, fork, *rest = make_lengths((1.0, 10), (1.0, 20), (1.0, 10), (0.0, 20)).trajectories
    group = GroupFacts("actor", 0, (first, dataclasses.replace(fork, episode_idx=0), *rest))
    assert LengthShaping(weight=0.2)(group) == pytest.approx((0.9, 0.9, 1.1, 0.0))


def make_ready(*advantages: tuple[float, int]) -> ReadyGroup:
    """One sample each of (advantage, trained tokens)."""
    samples = tuple(
        SampleView(
            group_id=0,
            episode_idx=idx,
            task_id="",
            payload=PayloadRef(0, 0, 0),
            advantages=((0, num, value),),
            num_tokens=num,
        )
        for idx, (value, num) in enumerate(advantages)
    )
    return ReadyGroup(
        group_id=0,
        samples=samples,
        oldest_version=0,
        num_tokens=sum(n for _, n in advantages),
        num_trained_tokens=sum(n for _, n in advantages),
        advantage_sum=sum(a * n for a, n in advantages),
        advantage_square_sum=sum(a * a * n for a, n in advantages),
        reward_sum=0.0,
        episode_reward_sum=0.0,
        num_episodes=len(samples),
    )


def values_of(groups: list[ReadyGroup]) -> list[float]:
    return [value for g in groups for s in g.samples for _, _, value in s.advantages]


def test_a_batch_is_whitened_over_its_tokens():
    # Three tokens of 1 and one of -3: mean 0, mean square 3. With 4 instead of 1 and 0: shifted by 3.
    groups = [make_ready((4.0, 1), (4.0, 2)), make_ready((0.0, 1))]
    whitened = normalize_advantages(groups, "whiten")
    assert values_of(whitened) == pytest.approx([3**-0.5, 3**-0.5, -(3**0.5)], rel=1e-5)
    assert sum(g.advantage_sum for g in whitened) == pytest.approx(0.0, abs=1e-9)
    assert sum(g.advantage_square_sum for g in whitened) == pytest.approx(4.0, rel=1e-5)


def test_scaling_keeps_the_signs_and_the_groups_given():
    groups = [make_ready((1.0, 1), (-2.0, 2))]
    # Mean square 9 / 3.
    assert values_of(normalize_advantages(groups, "scale")) == pytest.approx(
        [3**-0.5, -2 * 3**-0.5], rel=1e-5
    )
    assert values_of(groups) == [1.0, -2.0]
    assert normalize_advantages(groups, "none") == groups
    assert values_of(normalize_advantages([make_ready((0.0, 3))], "whiten")) == [0.0]


# --- several rewards (GDPO), baselines over groups (RAE) --------------------------------------------


def with_metrics(group: GroupFacts, **metrics: tuple[float, ...]) -> GroupFacts:
    """One value of each metric per episode."""
    num = len(group.trajectories)
    by_episode = {i: {name: values[i] for name, values in metrics.items()} for i in range(num)}
    return replace(group, metrics=by_episode)


def test_gdpo_tells_apart_what_a_sum_of_rewards_does_not():
    # Deviation of (1, 0) is sqrt(1/2), so each reward that differs gives +-1/2 / sqrt(1/2) = +-sqrt(1/2).
    one = with_metrics(make_group(0.0, 0.0), right=(1.0, 0.0), format=(1.0, 1.0))
    both = with_metrics(make_group(0.0, 0.0), right=(1.0, 0.0), format=(1.0, 0.0))
    credit = GdpoCredit(rewards={"right": 1.0, "format": 1.0}, epsilon=1e-12)
    root = math.sqrt(0.5)
    assert credit(one) == pytest.approx((root, -root))
    assert credit(both) == pytest.approx((2 * root, -2 * root))


def test_gdpo_weighs_normalized_rewards_whatever_their_scale():
    group = with_metrics(make_group(1.0, 0.0), length=(-900.0, -100.0))
    credit = GdpoCredit(rewards={"reward": 1.0, "length": 0.25}, epsilon=1e-12)
    assert credit(group) == pytest.approx((math.sqrt(0.5) * 0.75, -math.sqrt(0.5) * 0.75))


def test_gdpo_normalizes_each_role_on_its_own():
    group = with_metrics(make_group(0.0, 0.0, 0.0, 0.0, roles=("a", "a", "b", "b")), m=(1.0, 0.0, 5.0, 5.0))
    root = math.sqrt(0.5)
    assert GdpoCredit(rewards={"m": 2.0}, epsilon=1e-12)(group) == pytest.approx(
        (2 * root, -2 * root, 0.0, 0.0)
    )


def test_gdpo_names_a_metric_that_an_episode_lacks():
    with pytest.raises(DataError, match=r"episode 0 has no metric 'format', .* metrics are: right"):
        GdpoCredit(rewards={"format": 1.0})(with_metrics(make_group(0.0), right=(1.0,)))


def test_rae_compares_with_the_moving_average_of_earlier_rewards():
    credit = RaeCredit(decay=0.5).make()
    # b: 0, 1/2, 3/4
    assert [credit(make_group(r))[0] for r in (1.0, 1.0, -1.0)] == [1.0, 0.5, -1.75]


def test_rae_has_a_baseline_for_each_role_and_source():
    credit = RaeCredit(decay=0.5).make()
    credit(replace(make_group(1.0, -1.0, roles=("first", "second")), source="chess"))
    again = replace(make_group(0.0, 0.0, roles=("first", "second")), source="chess")
    assert credit(again) == (-0.5, 0.5)
    assert credit(replace(again, source="go")) == (0.0, 0.0)


def test_rae_counts_a_group_as_so_many_equal_episodes():
    credit = RaeCredit(decay=0.5).make()
    assert credit(make_group(1.0, 0.0, 0.0)) == (1.0, 0.0, 0.0)
    # b = (1 - 1/8) * 1/3 = 7/24
    assert credit(make_group(1.0)) == pytest.approx((17 / 24,))


def test_rae_goes_on_where_its_state_was_taken():
    credit = RaeCredit().make()
    credit(make_group(1.0, 0.5))
    restored = RaeCredit().make()
    restored.restore(credit.state())
    assert restored(make_group(0.25)) == credit(make_group(0.25))


def test_rae_is_not_spoiled_by_an_absurd_reward():
    credit = RaeCredit(decay=0.5).make()
    credit(make_group(1e300))
    assert credit(make_group(1.0)) == (1.0,)


# --- heads and those who work for them ------------------------------------------------------------


def make_crews(*crews: tuple[float, tuple[float, ...]], head: str = "proposer") -> GroupFacts:
    """Per episode the reward of its head, and those of its solvers."""
    rewards = [(idx, head, own) for idx, (own, _) in enumerate(crews)]
    rewards += [(idx, "solver", reward) for idx, (_, solvers) in enumerate(crews) for reward in solvers]
    rewards.sort(key=lambda each: each[0])
    made = make_group(*(reward for _, _, reward in rewards), roles=tuple(role for _, role, _ in rewards))
    placed = zip(made.trajectories, rewards, strict=True)
    return replace(made, trajectories=tuple(replace(t, episode_idx=idx) for t, (idx, _, _) in placed))


def test_hierarchical_compares_heads_over_the_group_and_workers_within_their_episode():
    # Heads 1 and 0: +- sqrt(1/2). Solvers 1, 0 of the first episode: +-1/2 over 1/2; those of the second,
    # whose task is hard, are alike: 0, although they earned less than the mean of all solvers.
    root = math.sqrt(0.5)
    advantages = HierarchicalCredit(epsilon=1e-12)(make_crews((1.0, (1.0, 0.0)), (0.0, (0.0, 0.0))))
    assert advantages == pytest.approx((root, 1.0, -1.0, -root, 0.0, 0.0))


def test_hierarchical_adds_what_the_team_was_worth():
    # Means of the episodes 1/2 and 0, of the group 1/4: +-1/4; within the first +-1/2. Nothing is divided.
    credit = HierarchicalCredit(scale="none", team_weight=2.0)
    advantages = credit(make_crews((1.0, (1.0, 0.0)), (0.0, (0.0, 0.0))))
    assert advantages == pytest.approx((0.5, 0.5 + 0.5, -0.5 + 0.5, -0.5, -0.5, -0.5))


def test_hierarchical_calls_heads_what_the_recipe_calls_so():
    group = make_crews((1.0, (1.0,)), (0.0, (0.0,)), head="lead")
    assert HierarchicalCredit()(group) == (0.0,) * 4
    named = HierarchicalCredit(heads=("lead",), scale="none")(group)
    assert named == pytest.approx((0.5, 0.0, -0.5, 0.0))
