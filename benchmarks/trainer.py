"""Measures the CPU seconds of a training step of SmolLM2 (135 million parameters) in bfloat16, one thread.

A step trains 8 groups of 8 samples, each a prompt of 45 tokens and a completion of 8, as `real/words` does.

    shared    `train_step`, with the samples of a group sharing their prompt
    alone     the same without sharing
    lora      the same as `shared`, with LoRA of rank 16
    bare      a plain PyTorch loop: weights in bfloat16, padded rows, logits of the completions only, and the
              same loss, gradient clipping, and AdamW

    speedup_vs_bare          CPU seconds of `bare` divided by those of `shared`
    speedup_alone_vs_bare    the same for `alone`
    lora_ratio               CPU seconds of `lora` divided by those of `shared`
    loss_gap, norm_gap       relative differences of the first step's loss and gradient norm from those of
                             `bare` in float32

Each run is a child process that loads the model, trains one step to warm up, and then times `--steps` more.
The runs of all sides alternate `--repeats` times. Needs models/smollm2 (`astraflow model fetch smollm2`).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.models.loading import load_causal_lm
from astraflow.service.process import settle_memory
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import Sample
from batches import make_batch, make_samples
from harness import Runs, report, show_table

_GROUPS = 8
_GROUP_SIZE = 8
_PROMPT = 45
_COMPLETION = 8
_VOCAB = 49_152
_LR = 1e-6
_BACKENDS: dict[str, dict[str, Any]] = {
    "shared": {},
    "alone": {"share_prefixes": False},
    "lora": {"lora": {"rank": 16}},
}
_SIDES = (*_BACKENDS, "bare")
_AT_LEAST = {"speedup_vs_bare": 5.0, "speedup_alone_vs_bare": 1.0}
_AT_MOST = {"lora_ratio": 1.05, "loss_gap": 0.02, "norm_gap": 0.02}


def main() -> None:
    """Measures all sides; the last line has the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="folder of the model")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", default=",".join(_SIDES), help="sides, with commas between them")
    parser.add_argument("--one", help="run this side in this process, and print its figures")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_measure(options.one, options.model, options.steps)))
        return
    if not Path(options.model).is_dir():
        parser.error(f"{options.model} does not exist; run `astraflow model fetch smollm2` first")
    sides = options.sides.split(",")
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            found[side].append(_in_child(side, options.model, options.steps))
    exact = _in_child("exact", options.model, 0)
    figures: dict[str, Any] = {
        f"{side}_cpu_s": Runs(tuple(s for run in runs for s in run["cpu_s"])) for side, runs in found.items()
    }
    if {"shared", "bare"} <= set(sides):
        figures["speedup_vs_bare"] = figures["bare_cpu_s"].median / figures["shared_cpu_s"].median
    if {"alone", "bare"} <= set(sides):
        figures["speedup_alone_vs_bare"] = figures["bare_cpu_s"].median / figures["alone_cpu_s"].median
    if {"shared", "lora"} <= set(sides):
        figures["lora_ratio"] = figures["lora_cpu_s"].median / figures["shared_cpu_s"].median
    gaps = {
        f"{prefix}{name}_gap": abs(found[side][0][name] / exact[name] - 1)
        for side, prefix in (("shared", ""), ("bare", "bare_"))
        if side in sides
        for name in ("loss", "norm")
    }
    rows = [
        [side, figures[f"{side}_cpu_s"], found[side][0]["loss"], found[side][0]["norm"]] for side in sides
    ]
    show_table("CPU seconds of a step", ["side", "CPU s", "loss", "gradient norm"], rows)
    report(figures | gaps, at_least=_AT_LEAST, at_most=_AT_MOST)


def _in_child(side: str, model: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", side, "--model", model, "--steps", str(steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(side: str, model: str, steps: int) -> dict[str, Any]:
    """Returns the CPU seconds of the timed steps, and the loss and gradient norm of the first step."""
    torch.set_num_threads(1)
    if side in _BACKENDS:
        loop: _Learner | _BareLoop = _Learner(model, _BACKENDS[side])
    else:
        loop = _BareLoop(model, "bfloat16" if side == "bare" else "float32")
    samples = [_samples(step) for step in range(steps + 1)]
    loss, norm = loop.step(samples[0], 0)
    seconds: list[float] = []
    for idx in range(1, steps + 1):
        began_s = time.process_time()
        loop.step(samples[idx], idx)
        seconds.append(time.process_time() - began_s)
    return {"cpu_s": seconds, "loss": loss, "norm": norm}


class _Learner:
    """The side of AstraFlow."""

    def __init__(self, model: str, backend: dict[str, Any]) -> None:
        settings = {"name": "torch", "dtype": "bfloat16", "num_threads": 1, **backend}
        train = {"lr": _LR, "token_budget": 4096, "loss": {"name": "reinforce"}, "backend": settings}
        config = TrainConfig.model_validate_json(json.dumps(train))
        self._learner = LossLearner(config, TorchBackend(config, model_dir=model))
        settle_memory()  # as a trainer does

    def step(self, samples: list[Sample], step: int) -> tuple[float, float]:
        """Trains one step. Returns its loss and gradient norm."""
        found = self._learner.train_step(make_batch(samples, step))
        values = {metric.name: metric.value for metric in found.metrics}
        return values["loss"], values["grad_norm"]


class _BareLoop:
    """The same step in plain PyTorch."""

    def __init__(self, model: str, dtype: Any) -> None:
        self._model: Any = load_causal_lm(model, dtype=dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LR, fused=True)

    def step(self, samples: list[Sample], step: int) -> tuple[float, float]:
        """Trains one step. Returns its loss and gradient norm."""
        del step
        ids = torch.tensor([np.frombuffer(s.trajectory.token_ids, np.int32).tolist() for s in samples])
        advantages = torch.tensor([sample.advantages[0].value for sample in samples])
        logits = self._model(input_ids=ids, logits_to_keep=_COMPLETION + 1).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, -_COMPLETION:].flatten(), reduction="none"
        )
        loss = (losses.view(len(samples), -1) * advantages[:, None]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach()), float(norm)


def _samples(step: int) -> list[Sample]:
    shape = {"num_prompt": _PROMPT, "num_sampled": _COMPLETION, "group_size": _GROUP_SIZE}
    return make_samples(_GROUPS, **shape, vocab_size=_VOCAB, part=step)


if __name__ == "__main__":
    main()
