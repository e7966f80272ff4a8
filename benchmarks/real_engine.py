"""Measures how many tokens SmolLM2 (135 million parameters) generates per CPU second in bfloat16, one thread.

    equal     8 prompts of 45 tokens with 8 completions of 32 tokens each, as in groups of `real/words`
    mixed     64 distinct prompts of 16 to 128 tokens, and completions of 8 to 96 tokens

    engine    the torch engine, which also computes logprobs
    generate  `model.generate` with a dynamic cache: one batch of 64 rows, padded on the left, until its
              longest completion is done
    vllm      vLLM's CPU build without compilation; only if `.venv-vllm` exists (`make .venv-vllm`)
    earlier   the engine of the checkout given by `--earlier`, by its own environment

    speedup_KIND          useful tokens per CPU second of `engine`, divided by those of `generate`
    speedup_vllm_KIND     the same, divided by those of `vllm`
    speedup_earlier_KIND  the same, divided by those of `earlier`
    error_ratio           mean distance of the engine's logprobs from those of the model in float32, divided
                          by the same distance of the model's own forward pass in bfloat16

Each run is a child process that loads the model, warms up, and then times `--rounds` rounds. The runs of all
sides alternate `--repeats` times. Needs models/smollm2 (`astraflow model fetch smollm2`).
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.service.process import settle_memory
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot

_ROWS = 64
_CONTEXT = 256
_VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm" / "bin" / "python"
_KINDS = ("equal", "mixed")
_AT_LEAST = {
    "speedup_equal": 2.0,
    "speedup_mixed": 3.0,
    "speedup_vllm_equal": 1.5,
    "speedup_vllm_mixed": 1.5,
    "speedup_earlier_equal": 2.0,
    "speedup_earlier_mixed": 2.0,
}
_AT_MOST = {"error_ratio": 1.0}

Work = list[tuple[list[int], int]]
"""Prompts, each with the number of tokens to generate."""


def main() -> None:
    """Measures all sides; the last line has the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="folder of the model")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--earlier", type=Path, help="checkout of an earlier commit, with its .venv")
    parser.add_argument("--one", help="run this side in this process, and print its figures")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_SIDES[options.one](options.model, options.rounds)))
        return
    if not Path(options.model).is_dir():
        parser.error(f"{options.model} does not exist; run `astraflow model fetch smollm2` first")
    from harness import Runs, report, show_table

    others = {"vllm": _VLLM.exists(), "earlier": bool(options.earlier)}
    sides = ["engine", "generate", *(side for side, is_there in others.items() if is_there)]
    found: dict[str, dict[str, list[float]]] = {side: {kind: [] for kind in _KINDS} for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            for kind, speeds in _in_child(side, options).items():
                found[side][kind] += speeds
    figures: dict[str, Any] = {}
    for side in sides:
        figures |= {f"{side}_{kind}": Runs(tuple(found[side][kind])) for kind in _KINDS}
    for kind in _KINDS:
        ours = figures[f"engine_{kind}"].median
        figures[f"speedup_{kind}"] = ours / figures[f"generate_{kind}"].median
        for side in sides[2:]:
            figures[f"speedup_{side}_{kind}"] = ours / figures[f"{side}_{kind}"].median
    figures |= _in_child("errors", options)
    rows = [[side, *(figures[f"{side}_{kind}"] for kind in _KINDS)] for side in sides]
    show_table("useful tokens per CPU second", ["side", *_KINDS], rows)
    report(figures, at_least=_AT_LEAST, at_most=_AT_MOST)


def _in_child(side: str, options: argparse.Namespace) -> dict[str, Any]:
    python = sys.executable
    works = ""
    if side == "earlier":
        python = str(options.earlier / ".venv" / "bin" / "python")
        side = "engine"
    command = [python, __file__, "--one", side, "--model", options.model, "--rounds", str(options.rounds)]
    if side == "vllm":
        script = Path(__file__).with_name("vllm_side.py")
        command = [str(_VLLM), str(script), options.model, str(options.rounds)]
        works = json.dumps({kind: _work(kind) for kind in _KINDS})
    done = subprocess.run(command, check=True, input=works, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _work(kind: str) -> Work:
    rng = np.random.default_rng(0)
    if kind == "equal":
        prompts = [rng.integers(3, 49_152, 45).tolist() for _ in range(8)]
        return [(prompts[row // 8], 32) for row in range(_ROWS)]
    lengths = rng.integers(16, 129, _ROWS)
    return [(rng.integers(3, 49_152, n).tolist(), int(rng.integers(8, 97))) for n in lengths]


def _speeds(run: Callable[[Work], int], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for kind in _KINDS:
        work = _work(kind)
        run([(prompt, 4) for prompt, _ in work])
        found[kind] = []
        for _ in range(rounds):
            began_s = time.process_time()
            num_tokens = run(work)
            found[kind].append(num_tokens / (time.process_time() - began_s))
    return found


def _generate_speeds(model_dir: str, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    model: Any = load_causal_lm(model_dir, dtype="bfloat16")

    def run(work: Work) -> int:
        longest = max(len(prompt) for prompt, _ in work)
        ids = torch.tensor([[2] * (longest - len(p)) + p for p, _ in work])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in work])
        count = max(count for _, count in work)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=True, temperature=1.0, top_k=0,
                eos_token_id=None, pad_token_id=2, disable_compile=True,
            )  # fmt: skip
        assert out.shape[1] == longest + count
        return sum(count for _, count in work)

    return _speeds(run, rounds)


def _engine_speeds(model_dir: str, rounds: int) -> dict[str, list[float]]:
    with asyncio.Runner() as runner:
        engine = _make_engine(model_dir)
        settle_memory()  # as a rollout service does

        def run(work: Work) -> int:
            return sum(len(generation.token_ids) for generation in runner.run(_run(engine, work)))

        found = _speeds(run, rounds)
        runner.run(engine.close())
    return found


def _make_engine(model_dir: str) -> TorchEngine:
    model: Any = load_causal_lm(model_dir, dtype="bfloat16")
    folder = Path(model_dir)
    config = TorchEngineConfig(num_slots=_ROWS, max_context=_CONTEXT, dtype="bfloat16", num_threads=1)
    torch.set_num_threads(1)
    return TorchEngine(config, WeightSnapshot("actor", 0, export_tensors(model), folder))


async def _run(engine: TorchEngine, work: Work) -> list[Generation]:
    requests = [
        GenerateRequest(token_ids=tuple(prompt), sampling=Sampling(max_tokens=count, seed=idx))
        for idx, (prompt, count) in enumerate(work)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def _errors(model_dir: str, rounds: int) -> dict[str, float]:
    del rounds
    work = _work("mixed")[:16]
    with asyncio.Runner() as runner:
        engine = _make_engine(model_dir)
        generations = runner.run(_run(engine, work))
        runner.run(engine.close())
    texts = [(prompt, generation) for (prompt, _), generation in zip(work, generations, strict=True)]
    exact, rounded = (_module_logprobs(model_dir, dtype, texts) for dtype in ("float32", "bfloat16"))
    ours = np.concatenate([generation.logprobs for generation in generations])
    error = float(np.abs(ours - exact).mean())
    module_error = float(np.abs(rounded - exact).mean())
    return {
        "logprob_error": error,
        "module_logprob_error": module_error,
        "error_ratio": error / module_error,
    }


@torch.no_grad()
def _module_logprobs(model_dir: str, dtype: Any, texts: list[tuple[list[int], Generation]]) -> Any:
    model: Any = load_causal_lm(model_dir, dtype=dtype)
    found: list[Any] = []
    for prompt, generation in texts:
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(found)


_SIDES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "engine": _engine_speeds,
    "generate": _generate_speeds,
    "errors": _errors,
}


if __name__ == "__main__":
    main()
