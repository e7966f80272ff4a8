"""Measures what `exact: true` costs: the same steps and the same generation with and without it, on one
thread each.

    step_ratio            time of a training step with it, divided by the time without
    step_cpu_ratio        the same in CPU time, which hardly depends on other load
    generate_ratio        time of generation by the torch engine with it, divided by the time without
    generate_cpu_ratio    the same in CPU time
    gap_max               largest difference between the logprobs of trainer and engine, in nats; must be 0
    usual_gap_max         the same without `exact: true`

The model has the quickstart's shape and random weights. A batch is what the engine generates from random
prompts of the quickstart's length: 64 groups of 8. `--rounds` sets how many times each is timed, in turns.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.models.loading import export_tensors
from astraflow.protocols import StepResult
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import AdvantageSpan, Batch, BatchTotals, GenerateRequest, Generation, Sample, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from harness import Runs, report, show_table

_SHAPE: dict[str, Any] = {
    "vocab_size": 22, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_NUM_GROUPS = 64
_GROUP_SIZE = 8
_PROMPT_TOKENS = 11
_NAMES = {True: "exact", False: "usual"}


def main() -> None:
    """Measures and prints; the last line has the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured")
    parser.add_argument("--groups", type=int, default=_NUM_GROUPS, help="groups of a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="astraflow-exact-") as folder:
        Qwen3ForCausalLM(Qwen3Config(**_SHAPE)).save_pretrained(folder)
        figures = _measure(Path(folder), options.rounds, options.groups)
    show_table("exact: true", ["figure", "value"], sorted(figures.items()))
    report(figures, at_most={"gap_max": 0.0})


def _measure(model_dir: Path, rounds: int, num_groups: int) -> dict[str, Any]:
    prompts = _prompts(num_groups)
    figures: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        engines = {exact: runner.run(_engine(model_dir, exact=exact)) for exact in _NAMES}
        made = {exact: runner.run(_generate(engine, prompts)) for exact, engine in engines.items()}
        wall, cpu = _timed(
            {
                name: lambda exact=exact: runner.run(_generate(engines[exact], prompts))
                for exact, name in _NAMES.items()
            },
            rounds,
        )
        for engine in engines.values():
            runner.run(engine.close())
    num_tokens = sum(len(generation.token_ids) for generation in made[True])
    for name, runs in wall.items():
        figures[f"{name}_tokens_per_s"] = Runs(tuple(num_tokens / value for value in runs.values))
    figures |= {"generate_ratio": _ratios(wall), "generate_cpu_ratio": _ratios(cpu)}
    steps = {exact: _Steps(model_dir, prompts, made[exact], exact=exact) for exact in _NAMES}
    # With a learning rate of 0, every step has the engine's weights.
    gaps = {exact: step.gap_max() for exact, step in steps.items()}
    wall, cpu = _timed({name: steps[exact].step for exact, name in _NAMES.items()}, rounds)
    figures |= {f"{name}_step_s": runs for name, runs in wall.items()}
    figures |= {"step_ratio": _ratios(wall), "step_cpu_ratio": _ratios(cpu)}
    return figures | {"gap_max": gaps[True], "usual_gap_max": gaps[False]}


def _timed(runs: Mapping[str, Callable[[], object]], rounds: int) -> tuple[dict[str, Runs], dict[str, Runs]]:
    """Measures the seconds of each run, in wall-clock and CPU time; the runs alternate."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = (time.perf_counter(), time.process_time())
            run()
            wall[name].append(time.perf_counter() - began[0])
            cpu[name].append(time.process_time() - began[1])
    wall_runs, cpu_runs = ({name: Runs(tuple(s)) for name, s in each.items()} for each in (wall, cpu))
    return wall_runs, cpu_runs


def _ratios(seconds: dict[str, Runs]) -> Runs:
    pairs = zip(seconds["exact"].values, seconds["usual"].values, strict=True)
    return Runs(tuple(exact_s / usual_s for exact_s, usual_s in pairs))


def _prompts(num_groups: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    first = [tuple(rng.integers(2, _SHAPE["vocab_size"], _PROMPT_TOKENS).tolist()) for _ in range(num_groups)]
    return [prompt for prompt in first for _ in range(_GROUP_SIZE)]


async def _engine(model_dir: Path, *, exact: bool) -> TorchEngine:
    model = Qwen3ForCausalLM.from_pretrained(model_dir)
    snapshot = WeightSnapshot("actor", 0, export_tensors(model), model_dir)
    return TorchEngine(TorchEngineConfig(num_slots=384, max_context=64), snapshot, exact=exact)


async def _generate(engine: TorchEngine, prompts: list[tuple[int, ...]]) -> list[Generation]:
    """Generates completions of 8 to 19 tokens."""
    requests = [
        GenerateRequest(token_ids=prompt, sampling=Sampling(max_tokens=8 + idx % 12, seed=idx))
        for idx, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*map(engine.generate, requests)))


class _Steps:
    """Training steps on the engine's completions."""

    def __init__(
        self, model_dir: Path, prompts: list[tuple[int, ...]], made: list[Generation], *, exact: bool
    ) -> None:
        config = TrainConfig.model_validate_json(json.dumps({"lr": 0.0, "minibatches": 2}))
        self._learner = make_learner(config, model_dir=model_dir, exact=exact)
        pairs = zip(prompts, made, strict=True)
        self._samples = tuple(_sample(idx, prompt, one) for idx, (prompt, one) in enumerate(pairs))
        self._step = 0

    def step(self) -> StepResult:
        totals = BatchTotals(
            num_groups=len(self._samples) // _GROUP_SIZE, num_samples=len(self._samples), num_tokens=0,
            num_trained_tokens=0, advantage_sum=0.0, advantage_square_sum=0.0, reward_sum=0.0,
        )  # fmt: skip
        batch = Batch(
            policy="actor", step=self._step, rank=0, world=1, samples=self._samples, totals=totals,
            trainer_version=0, staleness_mean=0.0, staleness_max=0,
        )  # fmt: skip
        self._step += 1
        return self._learner.train_step(batch)

    def gap_max(self) -> float:
        """Returns the largest gap of one step."""
        return next(item.value for item in self.step().metrics if item.name == "behavior_gap_max")


def _sample(idx: int, prompt: tuple[int, ...], made: Generation) -> Sample:
    recorder = EpisodeRecorder()
    recorder.record(Speaker("actor", "actor", 1.0), 0, prompt, made)
    (trajectory,) = recorder.trajectories({}, {})
    span = AdvantageSpan(len(prompt), len(trajectory.mask), (-1.0) ** idx)
    return Sample(
        group_id=idx // _GROUP_SIZE, episode_idx=idx, task_id="t", trajectory=trajectory, advantages=(span,)
    )


if __name__ == "__main__":
    main()
