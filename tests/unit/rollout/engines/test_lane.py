"""A batch of requests under one version, without threads."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import RolloutError
from astraflow.models.loading import export_tensors, fit_tensors
from astraflow.rollout.engines import pages
from astraflow.rollout.engines.cache import CacheShape, KvCache, Stretch
from astraflow.rollout.engines.forward import Forward, make_forward
from astraflow.rollout.engines.jobs import Job, Outcome
from astraflow.rollout.engines.lane import Lane
from astraflow.types import Generation, Media, Sampling
from drivers.engine_models import make_random_model

PROMPT = (5, 9, 3, 30, 12)


@pytest.fixture(autouse=True)
def kept_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the short sequences of these tests be kept."""
    monkeypatch.setattr(pages, "LEAST_KEPT", 1)


class Recording:
    """A forward that notes what it is asked to prefill."""

    def __init__(self, inner: Forward) -> None:
        self.inner = inner
        self.prefills: list[tuple[int, ...]] = []
        """Shapes."""
        self.extensions: list[tuple[int, ...]] = []
        self.newest: list[list[int]] = []
        """The tokens of each decoding step."""

    @property
    def cache_shape(self) -> CacheShape:
        return self.inner.cache_shape

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def refresh(self) -> None:
        self.inner.refresh()

    def prefill(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        cache: KvCache,
        media: Sequence[Media] | None = None,
    ) -> None:
        self.prefills.append(tuple(tokens.shape))
        self.inner.prefill(tokens, rows, cache, None)  # the models here read only text

    def extend(self, tokens: torch.Tensor, stretch: Stretch, cache: KvCache) -> None:
        self.extensions.append(tuple(tokens.shape))
        self.inner.extend(tokens, stretch, cache)

    def decode(self, tokens: torch.Tensor, positions: Any, cache: KvCache) -> torch.Tensor:
        self.newest.append([int(token) for token in tokens])
        return self.inner.decode(tokens, positions, cache)

    @property
    def batches(self) -> list[int]:
        """The number of sequences in each decoding step."""
        return [len(tokens) for tokens in self.newest]

    def sequence_logits(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        return self.inner.sequence_logits(tokens)


class Bench:
    """A lane over a tiny model, and the outcomes of its jobs by name."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        num_spare: int = 4,
        stop_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        kind: str = "qwen3",
        piece: int = 0,
    ) -> None:
        """`piece`: size of the pieces in which prompts are prefilled; 0: the lane's own."""
        self.model = make_random_model(kind, seed=seed)
        self.forward = Recording(make_forward(self.model, max_context=64))
        self.lane = Lane(
            self.forward,
            num_slots=num_slots,
            max_context=64,
            stop_ids=stop_ids,
            version=0,
            num_spare=num_spare,
        )
        if piece:
            self.lane._max_tokens = piece
        self.outcomes: dict[str, Outcome] = {}

    def submit(
        self, name: str, prompt: tuple[int, ...] = PROMPT, *, max_new: int = 6, **sampling: Any
    ) -> Job:
        def resolve(outcome: Outcome) -> None:
            self.outcomes[name] = outcome

        media = sampling.pop("media", ())
        job = Job(prompt, Sampling(**sampling), max_new, None, resolve, media)
        self.lane.submit(job)
        return job

    @torch.inference_mode()
    def steps(self, count: int = 10_000) -> None:
        while count and self.lane.has_work:
            self.lane.step()
            count -= 1

    def generation(self, name: str) -> Generation:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Generation)
        return outcome

    def tokens(self, name: str) -> tuple[int, ...]:
        return self.generation(name).token_ids

    def logprobs(self, name: str) -> tuple[float, ...]:
        return self.generation(name).logprobs


def test_requests_join_and_leave_between_steps_and_do_not_disturb_each_other() -> None:
    alone: dict[str, tuple[int, ...]] = {}
    settings = {
        "a": {"prompt": PROMPT, "max_new": 20, "seed": 1},
        "b": {"prompt": (4, 4), "max_new": 3, "seed": 2, "temperature": 0.7},
        "c": {"prompt": tuple(range(2, 32)), "max_new": 9, "seed": 3, "top_k": 3},
        "d": {"prompt": (7,), "max_new": 12, "seed": 4, "temperature": 0.0},
        "e": {"prompt": (8, 8, 8), "max_new": 7, "seed": 5, "top_p": 0.5},
    }
    for name, chosen in settings.items():
        bench = Bench()
        bench.submit(name, **chosen)  # type: ignore[arg-type]
        bench.steps()
        alone[name] = bench.tokens(name)
    together = Bench(num_slots=3)
    for name, chosen in settings.items():
        together.submit(name, **chosen)  # type: ignore[arg-type]
        together.steps(2)
    together.steps()
    assert {name: together.tokens(name) for name in settings} == alone
    assert max(together.forward.batches) == 3


def test_a_prompt_of_a_group_is_prefilled_once() -> None:
    bench = Bench(num_slots=8)
    for i in range(4):
        bench.submit(f"first{i}", seed=i, max_new=30)
    bench.steps(3)
    for i in range(4):
        bench.submit(f"second{i}", seed=i, max_new=30)
    bench.steps()
    assert bench.forward.prefills == [(1, len(PROMPT) - 1)]
    for i in range(4):
        assert bench.tokens(f"second{i}") == bench.tokens(f"first{i}")
    assert len({bench.tokens(f"first{i}") for i in range(4)}) > 1


def test_requests_of_a_group_are_computed_as_one_until_their_tokens_differ() -> None:
    prompts = {"long": tuple(range(2, 32)), "short": (7, 9), "one": (4,), "middle": PROMPT}
    sizes = {"long": 5, "short": 4, "one": 3, "middle": 1}
    bench = Bench(num_slots=40)
    names = [f"{prompt} {i}" for i in range(5) for prompt in prompts if i < sizes[prompt]]
    for seed, name in enumerate(names):
        bench.submit(name, prompts[name.split()[0]], max_new=5 + seed % 4, seed=seed)
    bench.steps()
    paths = [(name.split()[0], *bench.tokens(name)) for name in names]
    distinct = [len({path[:n] for path in paths if len(path) > n}) for n in range(1, max(map(len, paths)))]
    assert bench.forward.batches == distinct
    assert distinct[0] == len(prompts) < distinct[1] < distinct[2]
    for seed, name in enumerate(names):
        alone = Bench(num_slots=1)
        alone.submit(name, prompts[name.split()[0]], max_new=5 + seed % 4, seed=seed)
        alone.steps()
        assert bench.tokens(name) == alone.tokens(name)
        assert bench.logprobs(name) == pytest.approx(alone.logprobs(name), abs=1e-5)


def test_requests_leave_and_join_a_group_without_changing_the_others() -> None:
    rng = np.random.default_rng(0)
    wanted = [(PROMPT if idx % 3 else (4, 4), int(rng.integers(2, 14)), idx % 5) for idx in range(60)]
    bench = Bench(num_slots=16)
    # Greedy rows never part, and seeds repeat.
    jobs = [
        bench.submit(str(idx), prompt, max_new=count, seed=seed, temperature=seed % 2)
        for idx, (prompt, count, seed) in enumerate(wanted)
    ]
    for job in jobs[:48:4]:
        bench.steps(2)
        bench.lane.drop(job)
    bench.steps()
    assert sum(bench.forward.batches) < bench.lane.generated_tokens
    for idx, (prompt, count, seed) in enumerate(wanted):
        if str(idx) not in bench.outcomes:
            continue
        alone = Bench(num_slots=1)
        alone.submit("a", prompt, max_new=count, seed=seed, temperature=seed % 2)
        alone.steps()
        assert alone.tokens("a") == bench.tokens(str(idx))


def test_diverged_weights_fail_all_of_a_group() -> None:
    bench = Bench(num_slots=8)
    bench.model.model.norm.weight.data.fill_(torch.nan)  # type: ignore[union-attr]
    for i in range(4):
        bench.submit(str(i), seed=i)
    bench.steps(1)
    assert all(isinstance(bench.outcomes[str(i)], RolloutError) for i in range(4))
    assert not bench.lane.has_work


def test_rows_that_are_rearranged_keep_their_tokens_and_settings() -> None:
    rng = np.random.default_rng(0)
    wanted = [
        (tuple(rng.integers(2, 40, rng.integers(1, 50)).tolist()), int(rng.integers(2, 14)), seed)
        for seed in range(90)
    ]
    bench = Bench(num_slots=40)
    jobs = [
        bench.submit(str(seed), prompt, max_new=count, seed=seed, temperature=seed % 3, top_k=seed % 5)
        for prompt, count, seed in wanted
    ]
    bench.steps(1)
    assert sorted(job.row for job in jobs if job.row >= 0) == list(range(40))
    submitted = [prompt[-1] for prompt, _, _ in wanted[:40]]
    assert sorted(bench.forward.newest[0]) == sorted(submitted)
    assert bench.forward.newest[0] != submitted  # the order, had nothing been rearranged
    bench.steps()
    for prompt, count, seed in wanted[::9]:
        alone = Bench(num_slots=1)
        alone.submit("a", prompt, max_new=count, seed=seed, temperature=seed % 3, top_k=seed % 5)
        alone.steps()
        assert alone.tokens("a") == bench.tokens(str(seed))


def test_short_and_long_prompts_are_prefilled_apart() -> None:
    bench = Bench()
    bench.submit("long", tuple(range(2, 42)))
    bench.submit("short", (3, 4, 5))
    bench.submit("other", tuple(range(3, 41)))
    bench.submit("single", (3,))
    bench.steps(1)
    assert bench.forward.prefills == [(2, 39), (1, 2)]


def test_a_stop_id_ends_a_completion_and_stays_in_it() -> None:
    free = Bench()
    free.submit("a", max_new=12, seed=3)
    free.steps()
    stop = free.tokens("a")[4]
    bench = Bench(stop_ids=frozenset([stop]))
    bench.submit("a", max_new=12, seed=3)
    bench.steps()
    outcome = bench.outcomes["a"]
    assert isinstance(outcome, Generation)
    assert outcome.finish_reason == "stop"
    assert outcome.token_ids == free.tokens("a")[: free.tokens("a").index(stop) + 1]


def test_new_weights_take_over_in_mid_generation_with_recomputed_keys_and_values() -> None:
    bench = Bench(num_slots=8)
    prompts = {
        "a": PROMPT,
        "b": (2, 3),
        "group0": (7, 8, 9),
        "group1": (7, 8, 9),
        "single0": (6,),
        "single1": (6,),
    }
    for seed, (name, prompt) in enumerate(prompts.items()):
        bench.submit(name, prompt, max_new=10, seed=seed)
    bench.steps(4)
    bench.submit("late", (7, 8, 9), max_new=10, seed=9)
    bench.steps(1)
    bench.forward.prefills.clear()
    newer = make_random_model(seed=9)
    with torch.inference_mode():
        bench.lane.replace(fit_tensors(bench.model, export_tensors(newer)).install, 7)
    bench.steps()
    models = {0: make_random_model(seed=0), 7: newer}
    for name, prompt in {**prompts, "late": (7, 8, 9)}.items():
        outcome = bench.outcomes[name]
        assert isinstance(outcome, Generation)
        num_old = 1 if name == "late" else 5
        assert outcome.versions == (0,) * num_old + (7,) * (10 - num_old)
        tokens = torch.tensor([*prompt, *outcome.token_ids])
        for i, (version, logprob) in enumerate(zip(outcome.versions, outcome.logprobs, strict=True)):
            with torch.no_grad():
                logits = models[version](tokens[None, : len(prompt) + i]).logits[0, -1]
            assert abs(float(torch.log_softmax(logits, -1)[outcome.token_ids[i]]) - logprob) < 1e-4
    assert bench.forward.prefills == [(2, 9), (1, 2)]  # a and b whole; the group's prompt once
    assert bench.forward.extensions == [(4, 5), (1, 1)]  # what the group and the two single tokens made


def test_a_dropped_request_leaves_its_slot_to_others() -> None:
    bench = Bench(num_slots=1)
    running, waiting = bench.submit("a", max_new=50), bench.submit("b")
    bench.submit("c")
    bench.steps(2)
    bench.lane.drop(waiting)
    bench.lane.drop(running)
    bench.lane.drop(running)
    bench.steps()
    assert set(bench.outcomes) == {"c"}


def test_diverged_weights_fail_the_request_and_spare_those_that_follow() -> None:
    bench = Bench()
    bench.submit("a", max_new=20)
    bench.steps(2)
    with torch.no_grad():
        bench.model.model.norm.weight.fill_(torch.inf)
    bench.steps()
    assert isinstance(bench.outcomes["a"], RolloutError)
    assert "version 0 gives logprobs that are not finite" in str(bench.outcomes["a"])
    with torch.inference_mode():
        bench.lane.replace(fit_tensors(bench.model, export_tensors(make_random_model(seed=0))).install, 1)
    bench.submit("b", max_new=20)
    bench.steps()
    assert len(bench.tokens("b")) == 20


def test_drain_returns_everything_unresolved() -> None:
    bench = Bench(num_slots=1)
    jobs = [bench.submit(name, max_new=40) for name in "abc"]
    bench.steps(2)
    assert (bench.lane.num_running, bench.lane.num_waiting) == (1, 2)
    assert bench.lane.drain() == jobs
    assert not bench.lane.has_work
    assert not bench.outcomes


@pytest.mark.parametrize("length", [1, 2, 30])
def test_scores_are_the_models_logprobs(length: int) -> None:
    bench = Bench()
    tokens = list(range(2, 2 + length))
    with torch.inference_mode():
        scores = bench.lane.score(tokens)
        logprobs = torch.log_softmax(make_random_model()(torch.tensor([tokens])).logits[0], -1)
    assert scores.dtype == np.float32
    expected = [float(logprobs[i, tokens[i + 1]]) for i in range(length - 1)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-4)


def test_the_most_likely_tokens_are_the_models() -> None:
    bench = Bench()
    tokens = list(range(2, 32))
    with torch.inference_mode():
        found = bench.lane.score_top(tokens, 3, 2.0)
        whole = torch.log_softmax(make_random_model()(torch.tensor([tokens])).logits[0, :-1] / 2, -1)
    expected = whole.topk(3)
    assert (found.top_ids.dtype, found.top_logprobs.dtype) == (np.int32, np.float32)
    assert found.top_ids.tolist() == expected.indices.tolist()
    assert np.abs(found.top_logprobs - expected.values.numpy()).max() < 1e-5


def test_dropping_a_request_of_another_lane_changes_nothing() -> None:
    here, there = Bench(), Bench()
    here.submit("mine", max_new=12)
    foreign = [there.submit(f"theirs {idx}", (4, idx), max_new=12) for idx in (5, 6)]
    here.steps(2)
    there.steps(2)
    for job in foreign:
        here.lane.drop(job)
    here.steps()
    there.steps()
    assert set(here.outcomes) == {"mine"}
    assert set(there.outcomes) == {"theirs 5", "theirs 6"}


def test_a_next_turn_computes_only_what_is_new() -> None:
    bench = Bench()
    bench.submit("first", max_new=6)
    bench.steps()
    second = (*PROMPT, *bench.tokens("first"), 7, 8, 9)
    for name in ("second", "twin"):
        bench.submit(name, second, max_new=4, seed=1)
    bench.steps()
    # The last token of the first turn was never computed, and that of a prompt is computed by the first step.
    assert (bench.forward.prefills, bench.forward.extensions) == ([(1, len(PROMPT) - 1)], [(1, 3)])
    alone = Bench()
    alone.submit("second", second, max_new=4, seed=1)
    alone.steps()
    assert bench.tokens("second") == bench.tokens("twin") == alone.tokens("second")
    assert bench.logprobs("second") == pytest.approx(alone.logprobs("second"), abs=1e-5)


@pytest.mark.parametrize(("least", "is_kept"), [(10, True), (11, False)])
def test_a_short_sequence_is_computed_again(
    least: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LEAST_KEPT", least)
    bench = Bench()
    bench.submit("first", max_new=6)
    bench.steps()
    bench.submit("second", (*PROMPT, *bench.tokens("first"), 7, 8), max_new=1)
    bench.steps()
    assert bench.forward.extensions == ([(1, 2)] if is_kept else [])


def test_new_weights_forget_the_turns_before() -> None:
    bench, other = Bench(seed=0), Bench(seed=1)
    bench.submit("first")
    bench.steps()
    bench.lane.replace(fit_tensors(bench.model, export_tensors(other.model)).install, 1)
    second = (*PROMPT, *bench.tokens("first"), 7)
    for each in (bench, other):
        each.submit("second", second)
        each.steps()
    assert bench.forward.extensions == []
    assert bench.logprobs("second") == pytest.approx(other.logprobs("second"), abs=1e-5)


@pytest.mark.parametrize("num_slots", [3, 8, 24])
def test_conversations_in_turn_are_as_if_each_turn_were_alone(num_slots: int) -> None:
    rng = np.random.default_rng(num_slots)
    bench = Bench(num_slots=num_slots)
    starts: list[tuple[int, ...]] = [PROMPT, PROMPT, (4, 4), (4,)]
    prompts = {f"{idx}": starts[idx % 4] for idx in range(12)}
    turns: dict[str, tuple[tuple[int, ...], int, int]] = {}
    num_tokens = 0
    for turn in range(4):
        names = list(rng.permutation(list(prompts)))
        for name in names:
            turns[f"{name}.{turn}"] = (prompts[name], int(rng.integers(1, 7)), int(rng.integers(3)))
            prompt, max_new, seed = turns[f"{name}.{turn}"]
            num_tokens += len(prompt) - 1
            bench.submit(f"{name}.{turn}", prompt, max_new=max_new, seed=seed)
            bench.steps(int(rng.integers(3)))
        if turn == 1:
            bench.lane.drop(bench.submit("dropped", (3, *PROMPT)))
        bench.steps()
        for name in names:
            said = bench.tokens(f"{name}.{turn}")
            prompts[name] = (*prompts[name], *said, *map(int, rng.integers(2, 32, size=2)))
    for name, (prompt, max_new, seed) in turns.items():
        alone = Bench(num_slots=1)
        alone.submit(name, prompt, max_new=max_new, seed=seed)
        alone.steps()
        assert bench.tokens(name) == alone.tokens(name)
        assert bench.logprobs(name) == pytest.approx(alone.logprobs(name), abs=1e-5)
    computed = sum(rows * length for rows, length in (*bench.forward.prefills, *bench.forward.extensions))
    if num_slots == 24:
        assert computed < num_tokens / 2


def computed(bench: Bench) -> int:
    """Number of prompt tokens that were computed."""
    return sum(rows * length for rows, length in (*bench.forward.prefills, *bench.forward.extensions))


def check_generation(
    prompt: tuple[int, ...], found: Generation, models: dict[int, Any], *, greedy: bool
) -> None:
    """Each token's logprob is that of a full forward pass with the version that is recorded for it."""
    tokens = torch.tensor([[*prompt, *found.token_ids]])
    at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    with torch.no_grad():
        logprobs = {v: torch.log_softmax(model(tokens).logits[0], -1)[at] for v, model in models.items()}
    for i, (token, version) in enumerate(zip(found.token_ids, found.versions, strict=True)):
        assert abs(float(logprobs[version][i, token]) - found.logprobs[i]) < 1e-4
        assert not greedy or token == int(logprobs[version][i].argmax())


@pytest.mark.parametrize("kind", ["qwen3", "mistral_window"])
@pytest.mark.parametrize(
    ("num_slots", "num_spare", "piece"), [(1, 1, 6), (3, 1, 0), (4, 0, 5), (4, 4, 9), (8, 30, 4)]
)
def test_forks_cancellations_and_new_versions_are_as_if_each_request_were_computed_afresh(
    kind: str, num_slots: int, num_spare: int, piece: int
) -> None:
    rng = np.random.default_rng(num_slots + 10 * num_spare)
    bench = Bench(num_slots=num_slots, num_spare=num_spare, kind=kind, piece=piece)
    models = {version: make_random_model(kind, seed=version) for version in range(3)}
    version = 0
    asked: dict[str, tuple[tuple[int, ...], bool]] = {}
    jobs: dict[str, Job] = {}
    for number in range(60):
        texts = [PROMPT]
        for name, (prompt, _) in asked.items():
            if isinstance(outcome := bench.outcomes.get(name), Generation):
                texts.append((*prompt, *outcome.token_ids))
        text = texts[int(rng.integers(len(texts)))]
        # The whole text is continued, or it is cut anywhere, as where a thought is left out.
        cut = len(text) if rng.random() < 0.6 else int(rng.integers(len(text) + 1))
        prompt = (*text[:cut], *map(int, rng.integers(2, 32, size=int(rng.integers(1, 9)))))[:50]
        greedy = bool(rng.random() < 0.5)
        asked[f"{number}"] = (prompt, greedy)
        jobs[f"{number}"] = bench.submit(
            f"{number}", prompt, max_new=int(rng.integers(1, 9)), seed=number, temperature=1.0 - greedy
        )
        bench.steps(int(rng.integers(4)))
        if rng.random() < 0.15:
            bench.lane.drop(jobs[f"{int(rng.integers(number + 1))}"])
        if rng.random() < 0.1:
            version = int(rng.integers(3))
            with torch.inference_mode():
                bench.lane.replace(fit_tensors(bench.model, export_tensors(models[version])).install, version)
    bench.steps()
    assert len(bench.outcomes) > 40
    for name, outcome in bench.outcomes.items():
        assert isinstance(outcome, Generation)
        check_generation(asked[name][0], outcome, models, greedy=asked[name][1])


def test_a_history_without_its_thoughts_continues_from_the_prompt_before_it() -> None:
    bench = Bench()
    bench.submit("first", max_new=12)
    bench.steps()
    assert computed(bench) == len(PROMPT) - 1
    reply = bench.tokens("first")[7:]
    bench.submit("second", (*PROMPT, *reply, 7, 8), max_new=4)
    bench.steps()
    # The first prompt is known, and the last token of a prompt is computed by the first step.
    assert computed(bench) == len(PROMPT) - 1 + len(reply) + 1


def test_conversations_in_step_keep_their_prefixes_in_a_pool_of_the_size_of_the_slots() -> None:
    bench = Bench(num_slots=4, num_spare=4)
    prompts = {f"{idx}": (10 + idx, 9, 3) for idx in range(8)}
    for turn in range(6):
        for name, prompt in prompts.items():
            bench.submit(f"{name}.{turn}", prompt, max_new=4, seed=turn)
        bench.steps()
        for name in prompts:
            prompts[name] = (*prompts[name], *bench.tokens(f"{name}.{turn}"), 7, 8)
    num_tokens = sum(map(len, prompts.values()))
    # Of each turn, only the two new tokens and the last one of the reply are computed.
    assert computed(bench) == 8 * (2 + 5 * 2) < num_tokens / 3


def test_requests_that_continue_kept_prefixes_do_not_pass_the_others_for_ever() -> None:
    bench = Bench(num_slots=2, num_spare=2)
    bench.submit("long", max_new=50)
    bench.submit("kept", (5,) * 20, max_new=1)
    bench.steps(3)
    bench.submit("new", (6,) * 20, max_new=1)
    for idx in range(30):
        bench.submit(f"kept.{idx}", (*(5,) * 20, idx), max_new=1)
    while "new" not in bench.outcomes:
        bench.steps(1)
    assert len(bench.outcomes) == 1 + 8 * 2 + 1


def test_a_long_prompt_is_prefilled_in_pieces_between_which_others_go_on() -> None:
    bench = Bench(piece=8)
    bench.submit("short", max_new=30)
    bench.steps(2)
    long = tuple(range(2, 32)) + tuple(range(31, 11, -1))
    bench.submit("long", long, max_new=3)
    bench.submit("twin", long, max_new=3)
    bench.submit("other", (4, 4), max_new=2)
    num_before = len(bench.forward.batches)
    while "long" not in bench.outcomes:
        bench.steps(1)
    assert bench.lane.generated_tokens > 10
    pieces = [shape for shape in bench.forward.extensions if shape[0] == 1]
    assert pieces[:7] == [(1, 8)] * 6 + [(1, 1)]
    assert len(bench.forward.batches) - num_before >= 7  # a step for each piece
    assert "other" in bench.outcomes
    bench.steps()
    assert max(length for _, length in (*bench.forward.prefills, *bench.forward.extensions)) == 8
    check_generation(long, bench.generation("long"), {0: bench.model}, greedy=False)
    assert bench.tokens("long") == bench.tokens("twin")


def test_a_request_whose_prompt_is_half_prefilled_can_leave_or_get_new_weights() -> None:
    bench = Bench(num_slots=2, piece=8)
    long = tuple(range(2, 32))
    job = bench.submit("long", long, max_new=3)
    bench.steps(2)
    assert (bench.lane.num_running, bench.lane.num_waiting) == (0, 1)
    bench.lane.drop(job)
    assert not bench.lane.has_work
    bench.submit("again", long, max_new=3)
    bench.steps(2)
    newer = make_random_model(seed=1)
    with torch.inference_mode():
        bench.lane.replace(fit_tensors(bench.model, export_tensors(newer)).install, 1)
    bench.steps()
    assert bench.generation("again").versions == (1, 1, 1)
    check_generation(long, bench.generation("again"), {1: newer}, greedy=False)
    job = bench.submit("last", long[::-1])
    bench.steps(1)
    assert bench.lane.drain() == [job]


def test_prompts_with_images_continue_nothing_and_are_not_continued() -> None:
    bench = Bench()
    prompt = tuple(range(2, 22))
    image: Any = ((0, b"an image"),)
    bench.submit("image", prompt, media=image, max_new=1)
    bench.steps()
    bench.submit("text", prompt, max_new=1)
    bench.steps()
    bench.submit("other", prompt, media=(*image, *image), max_new=1)
    bench.steps()
    assert bench.forward.prefills == [(1, 19)] * 3
    assert bench.forward.extensions == []


def test_failed_requests_leave_no_prefixes() -> None:
    bench = Bench(num_slots=2)
    bench.submit("first")
    bench.steps()
    weight = bench.model.model.norm.weight.data.clone()
    bench.model.model.norm.weight.data.fill_(torch.inf)
    bench.submit("broken", (*PROMPT, *bench.tokens("first"), 7))
    waiting = [bench.submit(f"waiting {idx}", (*PROMPT, *bench.tokens("first"), 8 + idx)) for idx in range(3)]
    bench.steps(1)
    bench.model.model.norm.weight.data.copy_(weight)
    assert isinstance(bench.outcomes["broken"], RolloutError)
    bench.steps()
    for job in waiting[1:]:
        name = f"waiting {waiting.index(job)}"
        check_generation(job.prompt, bench.generation(name), {0: bench.model}, greedy=False)
