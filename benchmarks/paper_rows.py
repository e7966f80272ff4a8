"""The rows of `make paper`: what each compares, its arms, and how its results are judged."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from arms import Arm, Found, Pool, reached
from shaped_link import Link

__all__ = ["ROWS", "Row"]

Verdict = Literal["shown", "half", "missed"]
Changes = Mapping[str, Any]
Judged = tuple[Verdict, str]
"""A verdict, and the figures behind it in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One table or figure."""

    name: str
    title: str
    text: str
    """What is compared, and what is emulated."""
    minutes: float
    """Expected minutes per seed on two idle cores; of a program, all of it."""
    arms: tuple[Arm, ...] = ()
    judge: Callable[[Found], Judged] = lambda _: ("missed", "nothing is compared")
    axis: tuple[str, str] = ("rollouts", "episodes")
    """What the picture's curves are drawn over, and its name."""
    columns: tuple[str, ...] = ("wall_s", "staleness_mean", "dropped_frac", "wait_frac")
    """Figures in the table of the page."""
    program: tuple[str, ...] = ()
    """A benchmark and its arguments, for a row without arms."""
    figures: tuple[tuple[str, str], ...] = ()
    """(name in a program's last line, its meaning)."""
    judge_figures: Callable[[Changes], Judged] = lambda _: ("missed", "nothing is compared")
    picture: str = ""
    """File in docs/images of a program."""


def _ratio(value: float, of: float) -> float:
    return value / of if of and math.isfinite(of) else math.nan


def _by(ratio: float, *, shown: float, half: float) -> Verdict:
    return "shown" if ratio <= shown else "half" if ratio <= half else "missed"


# --- data algorithms ------------------------------------------------------------------------------

_TARGETS = 0.95
"""Share of the lowest final score of all arms that every arm is asked to reach."""


def _sums_of(digits: int, size: int, split: str = "train") -> dict[str, Any]:
    args = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False}
    args |= {"min_digits": digits, "max_digits": digits}
    source = {"name": "reasoning_gym", "dataset": "basic_arithmetic"}
    return {**source, "split": split, "size": size, "args": args}


_MIXED: Changes = {
    "tasks.sources.sums.size": 160,
    "tasks.sources.easy": _sums_of(1, 60), "tasks.sources.hard": _sums_of(5, 160),
    "table.groups_per_batch": 8, "table.max_staleness": 4, "train.loss": {"name": "m2po"},
    "train.steps": 48, "eval.every": 8,
}  # fmt: skip
"""Few tasks, so that they recur; of one digit the model can add nearly all, of five none."""
_DYNAMIC: Changes = {"table.filters": [{"name": "zero_variance"}]}
_REPLAY: Changes = {**_DYNAMIC, "table.replay": {"share": 0.5, "select": "latest", "max_uses": 4}}
_GRESO: Changes = {**_REPLAY, "tasks.curators": [{"name": "shuffle"}, {"name": "greso", "policy": "actor"}]}
_DATA: Mapping[str, Changes] = {
    "vanilla": {},
    "dynamic sampling": _DYNAMIC,
    "+ replay": _REPLAY,
    "+ GRESO": _GRESO,
}


def _judge_data(found: Found) -> Judged:
    target = _TARGETS * min(found.final(arm) for arm in _DATA)
    spent = {arm: found.spent(arm, "rollouts", target) for arm in _DATA}
    ratio = _ratio(spent["+ GRESO"], spent["dynamic sampling"])
    numbers = ", ".join(f"{arm} {number:,.0f}" for arm, number in spent.items())
    return _by(ratio, shown=0.8, half=0.97), f"rollouts to a score of {target:.2f}: {numbers}"


# --- weights and links ----------------------------------------------------------------------------

_RATES = (1e-6, 5e-6, 3e-5)
_KEPT: Changes = {
    "train.steps": 12, "train.optimizer": {"warmup_steps": 1, "schedule": "constant"}, "eval.sets": {},
    "weights.delta": True, "weights.keep": 64, "weights.full_every": 64,
}  # fmt: skip
_BARE_WORDS: Changes = {"tasks.sources.everyday": None, "tasks.curators": [], "train.auxiliary": {}}
"""`real/words` or `real/follow` without the KL penalty and the tasks that only it uses."""
_BARE: Mapping[str, Changes] = {"words": _BARE_WORDS, "search": {}, "sums": {}}
_DELTAS = tuple(
    Arm(name=f"{task}, {rate:g}", recipe=f"real/{task}", changes={**own, **_KEPT, "train.lr": rate})
    for task, own in _BARE.items()
    for rate in _RATES
)


def _judge_deltas(found: Found) -> Judged:
    times = {arm: found.mean(arm, "full_mb") / found.mean(arm, "delta_mb") for arm in found.results}
    low = [times[arm.name] for arm in _DELTAS if arm.name.endswith(f"{_RATES[0]:g}") and arm.name in times]
    changed = [found.mean(arm, "changed_frac") for arm in found.results]
    text = (
        f"a delta is {min(times.values()):.0f} to {max(times.values()):.0f} times smaller than the full "
        f"version, and {min(changed):.2%} to {max(changed):.2%} of the weights change per step"
    )
    return _by(1 / min(low, default=1), shown=1 / 50, half=1 / 10), text


_REGION: Changes = {
    **_BARE_WORDS, "train.steps": 60, "table.max_staleness": 4, "table.engine_lag": 2, "weights.delta": True,
    "eval.every": 15, "eval.sets.trivia": None,
}  # fmt: skip


def _judge_regions(found: Found) -> Judged:
    gap = found.final("both near") - found.final("one far")
    slower = _ratio(found.mean("one far", "wall_s"), found.mean("both near", "wall_s"))
    wait, near_wait = (found.mean(arm, "wait_frac") for arm in ("one far", "both near"))
    text = (
        f"with one far service, the score is lower by {gap:.3f}, the run takes {slower:.2f} times as long, "
        f"trainers wait {wait:.0%} of the time (both near: {near_wait:.0%}), a version arrives in "
        f"{found.mean('one far', 'b_load_s'):.2f} s (near: {found.mean('both near', 'b_load_s'):.2f} s), and "
        f"{found.mean('one far', 'far_episodes_frac'):.0%} of the episodes come from its "
        f"{found.mean('one far', 'far_slots_frac'):.0%} of the slots"
    )
    return _by(max(slower / 1.1, 1 + gap / 0.05), shown=1.0, half=2.0), text


# --- staleness and orders -------------------------------------------------------------------------

_CLIP = {"name": "use", "use": "unskipped:behavior_grpo", "args": {"clip_low": 0.2, "clip_high": 0.2}}
_LOSSES = {"M2PO": {"name": "m2po"}, "GRPO": _CLIP}
_STALE = tuple(
    Arm(
        name=f"{loss}, staleness {num}",
        recipe="real/words",
        changes={
            **_BARE_WORDS, "train.steps": 48, "train.loss": config, "table.max_staleness": num,
            "eval.every": 12, "eval.sets.trivia": None,
        },
    )
    for num in (1, 4, 8)
    for loss, config in _LOSSES.items()
)  # fmt: skip


def _judge_stale(found: Found) -> Judged:
    lost = {
        loss: found.final(f"{loss}, staleness 1") - found.final(f"{loss}, staleness 8") for loss in _LOSSES
    }
    text = ", ".join(f"{loss} loses {number:.3f}" for loss, number in lost.items())
    means = [found.mean(f"{loss}, staleness 8", "staleness_mean") for loss in _LOSSES]
    verdict: Verdict = "missed"
    if lost["M2PO"] < lost["GRPO"]:
        verdict = "shown" if lost["M2PO"] <= 0.05 else "half"
    return verdict, f"from staleness 1 to 8 (measured mean {min(means):.1f}), {text}"


_ORDERS = ("edf", "fifo", "sweep")
_TWO_SUMS: Changes = {
    "tasks.sources.sums.size": 2000,
    "tasks.sources.hard": _sums_of(3, 2000),
    "workflow": {"use": "late_scores:solve_late", "args": {"scale": 1.0}},
    "table.groups_per_batch": 8, "table.max_staleness": 4, "train.loss": {"name": "m2po"},
    "rollout.max_episodes": 320,
    "eval.sets.heldout": {"num_tasks": 128, "workflow": {"name": "single_turn"}},
    "eval.sets.hard": {
        "num_tasks": 128, "workflow": {"name": "single_turn"},
        "source": {**_sums_of(3, 128, "heldout"), "seed": 1},
    },
}  # fmt: skip


def _judge_orders(found: Found) -> Judged:
    wall = {name: found.mean(name, "wall_s") for name in _ORDERS}
    dropped = {name: found.mean(name, "dropped_frac") for name in _ORDERS}
    parts = [f"{n} {wall[n]:.0f} s, {dropped[n]:.3f} dropped, {found.final(n):.2f}" for n in _ORDERS]
    is_quick = wall["edf"] <= 1.03 * wall["sweep"]
    is_kind = dropped["edf"] < dropped["sweep"]
    verdict: Verdict = "shown" if is_quick and is_kind else "half" if is_quick or is_kind else "missed"
    return verdict, f"seconds, groups dropped as stale, and score: {'; '.join(parts)}"


# --- several policies -----------------------------------------------------------------------------


def _select_arms(recipe: str, changes: Changes, alone: Changes, **workflow: str) -> tuple[Arm, ...]:
    """Makes the arms of `propose_and_select` from a recipe with one policy. `alone`: changes so that a step
    has as many completions."""
    select = {"name": "propose_and_select", "proposer": "proposer", "num_proposals": 3, **workflow}
    both = {**changes, "workflow": {**select, "selector": "selector"}}
    still = {"role": "frozen", "train": None, "table": None}
    short = {"sampling.max_tokens": 8}
    base = Arm(name="", recipe=recipe, changes=both)
    return (
        replace(base, name="together", policies={"proposer": {}, "selector": short}),
        replace(base, name="frozen selector", policies={"proposer": {}, "selector": {**short, **still}}),
        replace(base, name="frozen proposer", policies={"proposer": still, "selector": short}),
        replace(
            base,
            name="one policy for both",
            changes={**changes, "workflow": {**select, "selector": "proposer"}},
            policies={"proposer": {}},
        ),
        replace(base, name="the task alone", changes={**changes, **alone}, policies={"proposer": {}}),
    )


_SELECT_FOLLOW = _select_arms(
    "real/follow",
    {
        **_BARE_WORDS, "table.groups_per_batch": 4, "rollout.engine.max_context": 512, "eval.every": 10,
        "eval.sets.combinations.num_tasks": 160, "eval.sets.kinds": None, "eval.sets.trivia": None,
    },
    {"table.groups_per_batch": 16},
)  # fmt: skip
_FORMULAS = {"largest": 9, "lengths": [3], "heldout_frac": 0.1}
_SELECT_CODE = _select_arms(
    "code/tiny",
    {
        "model": "./models/code-select",
        "tasks.sources.programs.args": {"split": "train", **_FORMULAS},
        "eval.sets.heldout.source.args": {"split": "heldout", **_FORMULAS},
        "sampling.max_tokens": 28, "rollout.engine.max_context": 192, "table.groups_per_batch": 8,
        "train.steps": 64, "eval.every": 16,
    },
    {"table.groups_per_batch": 32},
    select_prompt="{prompt}{proposals}?",
)  # fmt: skip


def _judge_select(found: Found) -> Judged:
    arms = list(found.results)
    lines: list[str] = []
    wins: list[bool] = []
    for axis in ("completions", "tokens"):
        budget = found.least(axis, arms)
        score = {arm: found.after(arm, axis, budget) for arm in arms}
        wins.append(score["together"] > max(own for arm, own in score.items() if arm != "together"))
        shown = ", ".join(f"{arm} {own:.3f}" for arm, own in score.items())
        lines.append(f"after {budget:,.0f} {axis}: {shown}")
    first = found.results["together"][0]["points"][0]
    best, picked = first["best_score"], first["score"]
    lines.append(f"untrained, the best of three proposals has {best:.3f}, and the picked one {picked:.3f}")
    verdict: Verdict = "shown" if all(wins) else "half" if any(wins) else "missed"
    return verdict, "; ".join(lines)


_LATE = ((0.0, 56, "no wait"), (0.25, 60, "0.1 to 2 s"), (1.0, 72, "0.5 to 8 s"))
"""Multiples of the waits, minutes per seed, and the waits."""
_LATE_TARGET = 0.3
_OURS = "astraflow"
_SCHEDULES: Mapping[str, tuple[Changes, tuple[int, ...]]] = {
    _OURS: ({"max_staleness": 4, "engine_lag": 1}, (64, 128, 256)),
    "barrier": ({"max_staleness": 0, "engine_lag": 0, "sampler": {"name": "on_policy"}}, (64,)),
    "one step off": ({"max_staleness": 1, "engine_lag": 0, "sampler": {"name": "sweep"}}, (64, 128)),
    "partial rollouts": (
        {
            "max_staleness": 8,
            "engine_lag": 0,
            "sampler": {"name": "sweep"},
            "limiter": {"name": "use", "use": "schedules:InFlight", "args": {"over": 0.25}},
        },
        (64, 80),
    ),
}
"""Schedule -> its table, and the numbers of episodes in flight that it tries."""
_CHECK = {
    "solver": "writer",
    "checker": "checker",
    "check_prompt": "{prompt} Somebody said {answer}, which may be wrong.",
}


def _late_arms(scale: float) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            name=f"{name}, {in_flight} in flight",
            recipe="real/pair",
            changes={
                "workflow": {
                    "use": "late_scores:check_late",
                    "args": {"scale": scale, **_CHECK},
                    **dict.fromkeys(_CHECK),  # keys of the recipe's own workflow
                },
                "dataflow.admission": "all",
                "rollout.max_episodes": in_flight,
                "steps": 32,
                "eval.every": 4,
                "eval.sets.writer": None,
                "eval.sets.heldout.workflow": {"name": "solve_and_check", **_CHECK},
                "policies.writer.train.loss": {"name": "m2po"},
                **{f"policies.writer.table.{key}": value for key, value in table.items()},
            },
        )
        for name, (table, numbers) in _SCHEDULES.items()
        for in_flight in numbers
    )


def _judge_late(found: Found) -> Judged:
    best: dict[str, tuple[float, str]] = {}
    for arm in found.results:
        schedule, _, in_flight = arm.partition(", ")
        seconds = found.spent(arm, "at_s", _LATE_TARGET)
        best[schedule] = min(best.get(schedule, (math.inf, in_flight)), (seconds, in_flight))
    others = {name: own for name, own in best.items() if name != _OURS}
    fastest = min(others, key=lambda name: others[name][0])
    factor = _ratio(best[fastest][0], best[_OURS][0])
    pairs = zip(
        found.curve(f"{fastest}, {best[fastest][1]}", "at_s"),
        found.curve(f"{_OURS}, {best[_OURS][1]}", "at_s"),
        strict=True,
    )
    factors = [_ratio(reached(other, _LATE_TARGET), reached(own, _LATE_TARGET)) for other, own in pairs]
    shown = ", ".join(f"{name} {own[0]:.0f} s ({own[1]})" for name, own in best.items())
    speed = max(found.mean(arm, "tokens_per_s") for arm in found.results if arm.startswith(_OURS))
    verdict: Verdict = "shown" if factor > 1 and min(factors) > 1 else "half" if factor > 1 else "missed"
    return verdict, (
        f"{factor:.2f} times as fast to {_LATE_TARGET} as the best schedule with a barrier, {fastest} "
        f"({min(factors):.2f} to {max(factors):.2f} over seeds): {shown}; at most {speed:.0f} tokens/s"
    )


# --- programs -------------------------------------------------------------------------------------


def _judge_emulated(figures: Changes) -> Judged:
    low, high = figures["speedup_vs_best_range"]["0.05"]
    plain = figures["speedup_vs_plain_geomean"]
    verdict: Verdict = "shown" if low > 1 and plain >= 2.7 else "half" if low > 1 else "missed"
    return verdict, (
        f"{plain:.2f} times as fast as plain synchronous schedules on average (paper: 2.7), and {low:.2f} to "
        f"{high:.2f} times as fast as the fastest synchronous schedule"
    )


def _judge_scaling(figures: Changes) -> Judged:
    saved, strict = figures["paper_total_saved_frac"], figures.get("gpu_hours_saved_frac", 0.0)
    verdict: Verdict = "shown" if saved >= 0.13 else "half" if saved > 0 else "missed"
    return verdict, f"saves {saved:.3f} as the paper counts, and {strict:.3f} by a stricter comparison"


def _judge_race(figures: Changes) -> Judged:
    worst = [figures.get(f"speedup{end}_worst", 0.0) or 0.0 for end in ("", "_equal", "_nothing_shared")]
    verdict: Verdict = "shown" if min(worst[:2]) > 1 else "half" if worst[0] > 1 else "missed"
    shown = f"worst pair as shipped {worst[0]:.2f}, with TRL's loss {worst[1]:.2f}"
    return verdict, f"{shown}, nothing shared {worst[2]:.2f}"


ROWS = (
    Row(
        name="data",
        title="Data algorithms: score over rollouts",
        text="SmolLM2 learns sums of one, two, and five digits. Each arm adds one algorithm. Scores are "
        "those of held-out sums of two digits.",
        minutes=28,
        arms=tuple(Arm(name=n, recipe="real/sums", changes={**_MIXED, **own}) for n, own in _DATA.items()),
        judge=_judge_data,
    ),
    Row(
        name="deltas",
        title="Sparse updates and small versions",
        text="SmolLM2 trains on three tasks at three learning rates for 12 steps in bfloat16. Each version "
        "is compared with the one before. On a tiny model (commit `2e8ad75987`), deltas were "
        "[236 times](../benchmarks/results/paper/deltas.json) smaller at 1e-6, and 72 times at 5e-6.",
        minutes=21,
        arms=_DELTAS,
        judge=_judge_deltas,
        columns=("full_mb", "delta_mb", "changed_frac"),
    ),
    Row(
        name="regions",
        title="Cross-region rollouts",
        text="Two rollout services train SmolLM2 on `real/words` with deltas. One of them reaches dataflow "
        "and publisher through an emulated link of 4 Gbit/s and 300 ms each way, or both are near. "
        "A tiny model (commit `2e8ad75987`) ended at [0.929](../benchmarks/results/paper/pools.json) with "
        "two far pools of three, and at 0.956 with one near pool.",
        minutes=12,
        arms=tuple(
            Arm(name=name, recipe="real/words", changes=_REGION, pools=(Pool("a", 40), Pool("b", 40, link)))
            for name, link in (("both near", None), ("one far", Link(delay_s=0.3, bits_per_s=4e9)))
        ),
        judge=_judge_regions,
        axis=("at_s", "seconds"),
        columns=("wall_s", "wait_frac", "b_load_s", "far_episodes_frac", "far_slots_frac"),
    ),
    Row(
        name="m2po",
        title="M2PO and GRPO on stale data",
        text="SmolLM2 learns `real/words` with batches of up to 1, 4, and 8 versions. GRPO clips the ratio "
        "to the policy that sampled.",
        minutes=27,
        arms=_STALE,
        judge=_judge_stale,
        axis=("step", "steps"),
        columns=("staleness_mean", "staleness_max", "dropped_frac", "wall_s"),
    ),
    Row(
        name="edf",
        title="EDF, fifo, and sweep",
        text="SmolLM2 learns sums whose scores come late; those of three digits take six times as long. EDF "
        "came after the paper. Its prototype's `fifo` is `sweep` here; `fifo` here waits for slow "
        "groups and drops none. "
        "On a tiny model with a virtual clock (commit `2e8ad75987`), `edf` dropped "
        "[0.077](../benchmarks/results/paper/edf.json) of the groups and `sweep` 0.198, in equal times.",
        minutes=20,
        arms=tuple(
            Arm(name=name, recipe="real/sums", changes={**_TWO_SUMS, "table.sampler": {"name": name}})
            for name in _ORDERS
        ),
        judge=_judge_orders,
        axis=("at_s", "seconds"),
    ),
    Row(
        name="scaling",
        title="Auto-scaling",
        text="A [pool that sizes itself](pools.md#pool) is compared with fixed pools. Devices are emulated, "
        "and the clock is virtual. The paper saves 0.13 of all GPU-hours compared with 11 services; the"
        " stricter comparison is with the smallest fixed pool that takes at most 3 % longer.",
        minutes=10,
        program=("autoscale.py",),
        figures=(
            ("paper_total_saved_frac", "Share of all GPU-hours saved"),
            ("gpu_hours_saved_frac", "The same, stricter comparison"),
            ("paper_rollout_saved_frac", "Share of the rollout services' GPU-hours saved"),
            ("paper_wall_ratio", "Time divided by that of the fixed pool"),
        ),
        judge_figures=_judge_scaling,
        picture="autoscale.png",
    ),
    Row(
        name="multi-policy",
        title="Several policies that don't wait for each other, emulated",
        text="Two policies share ten emulated devices under a virtual clock: ten settings, three seeds. With"
        " lending, a trainer's devices generate while it waits. A switch between tasks costs 5 % of a "
        "step's time without waiting. Of whole runs, the end waits for the last episodes. With real "
        "services, 12 steps at load 0.8 without lending were 2.62 times as fast as colocated training "
        "([details](benchmarks.md#two-policies-on-emulated-devices)).",
        minutes=15,
        program=("multi_policy.py",),
        figures=(
            ("speedup_vs_plain_range", "Speedup over the better plain synchronous schedule (paper: 2.7)"),
            ("speedup_vs_plain_geomean", "Its geometric mean at loads up to 1.6"),
            ("speedup_vs_best_range", "Speedup over the fastest synchronous schedule, by cost of a switch"),
            ("speedup_vs_best_range_fixed_split", "The same without lending, cost 5 %"),
            ("frac_of_bound_min", "Least share of the bound, loads from 1.6, whole run (target 0.95)"),
            ("frac_of_bound_min_steady", "The same in the steady state"),
        ),
        judge_figures=_judge_emulated,
        picture="multi_policy_sweep.png",
    ),
    *(
        Row(
            name=f"waiting-{scale:g}",
            title=f"Several policies that don't wait for each other: scores after {waits}",
            text="Two full copies of SmolLM2 train together on `real/pair` with real services and a real "
            "clock. The scores of the first and of the final answer come late. Each schedule uses its "
            "best number of episodes in flight.",
            minutes=minutes,
            arms=_late_arms(scale),
            judge=_judge_late,
            axis=("at_s", "seconds"),
            columns=("wall_s", "tokens_per_s", "wait_frac", "staleness_mean", "dropped_frac"),
        )
        for scale, minutes, waits in _LATE
    ),
    Row(
        name="select-follow",
        title="Several policies and one: follow instructions",
        text="SmolLM2 writes three texts for a request of `real/follow`, and a selector picks one. The arms "
        "have equal completions per step, and are compared after equal completions and equal tokens.",
        minutes=65,
        arms=_SELECT_FOLLOW,
        judge=_judge_select,
        axis=("completions", "completions"),
        columns=("wall_s", "tokens_per_s", "wait_frac"),
    ),
    Row(
        name="select-code",
        title="Several policies and one: programs",
        text="The same with tiny models that write programs for formulas of three steps and larger numbers. "
        "With tiny models on sums (commit `2e8ad75987`), a solver with a verifier ended at "
        "[0.956](../benchmarks/results/paper/single-policy.json), and the solver alone with 2.5 times the "
        "rollouts at 0.975.",
        minutes=12,
        arms=_SELECT_CODE,
        judge=_judge_select,
        axis=("completions", "completions"),
        columns=("wall_s", "tokens_per_s", "wait_frac"),
    ),
    Row(
        name="race",
        title="A race with TRL",
        text="SmolLM2 learns `real/follow`: the same grid of learning rates for both sides, five seeds "
        "([details](benchmarks.md#comparison-with-trl)).",
        minutes=420,
        program=("real_vs_trl.py",),
        figures=(
            ("speedup", "Time to the target compared with TRL, as shipped"),
            ("speedup_worst", "Worst of five pairs"),
            ("speedup_equal", "The same with TRL's loss and every sample computed"),
            ("speedup_nothing_shared", "The same, and nothing shared or merged"),
        ),
        judge_figures=_judge_race,
        picture="real_vs_trl.png",
    ),
)
