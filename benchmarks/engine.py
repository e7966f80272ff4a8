"""Compares the generation speed of the torch engine with `model.generate` on padded batches, one thread.

Useful tokens are the requested ones. The baseline takes the requests in batches of 64, pads the prompts on
the left, and generates until the longest request of the batch is done. It doesn't compute logprobs, whereas
the engine does. Prompts are distinct, so the engine gains nothing from sharing them within groups.

`generate` takes the requests in their given order. `sorted` puts prompts of similar length together. `static`
does so too, and allocates the cache of a batch once. `oracle` sorts by the lengths of the completions, which
are known only afterwards. `speedup` compares with `generate`, and `speedup_best` with the fastest baseline
that a server could use, so not with the oracle.

    python benchmarks/engine.py [--repeats 3] [--requests 192]
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.models.loading import export_tensors
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from harness import Runs, interleaved, report, show_table

VOCAB = 64
BATCH = 64
MAX_CONTEXT = 512
BASELINES = ("generate", "sorted", "static")
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4},
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "num_attention_heads": 4},
}


@dataclass(frozen=True)
class Workload:
    """Prompts, and the number of tokens that each requests."""

    prompts: list[tuple[int, ...]]
    outputs: list[int]

    def ordered(self, lengths: Sequence[int]) -> "Workload":
        """Returns the same requests, sorted by these lengths, longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        return Workload([self.prompts[i] for i in order], [self.outputs[i] for i in order])


def make_workload(kind: str, num_requests: int) -> Workload:
    """Makes the requests. `mixed`: prompts of 16-256 tokens and outputs of 8-256, uniform. `equal`: 136 and
    132, which are the same means."""
    rng = np.random.default_rng(0)
    if kind == "mixed":
        prompts = rng.integers(16, 257, num_requests)
        outputs = rng.integers(8, 257, num_requests)
    else:
        prompts = np.full(num_requests, 136)
        outputs = np.full(num_requests, 132)
    return Workload([tuple(rng.integers(2, VOCAB, n).tolist()) for n in prompts], outputs.tolist())


def make_model(size: str) -> Any:
    """Makes a random model of the quickstart's architecture, without an end-of-text token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        head_dim=SIZES[size]["hidden_size"] // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
        **SIZES[size],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def run_generate(model: Any, work: Workload, *, cache: str | None = None) -> None:
    """Runs the baseline, with transformers' default cache or another kind."""
    for start in range(0, len(work.prompts), BATCH):
        prompts = work.prompts[start : start + BATCH]
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        new = max(work.outputs[start : start + BATCH])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                cache_implementation=cache,
                disable_compile=True,  # on a CPU, a compiled loop is slower, and takes a minute to compile
            )
        assert out.shape[1] == longest + new


def run_engine(engine: TorchEngine, work: Workload, runner: asyncio.Runner) -> None:
    """Sends all requests at the same time. The engine runs 64 of them at a time."""

    async def main() -> None:
        requests = [
            GenerateRequest(token_ids=prompt, sampling=Sampling(max_tokens=count, seed=i))
            for i, (prompt, count) in enumerate(zip(work.prompts, work.outputs, strict=True))
        ]
        generations = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [len(g.token_ids) for g in generations] == work.outputs

    runner.run(main())


def measure(size: str, num_requests: int, repeats: int) -> dict[str, Runs]:
    """Measures the tokens per second of all, for both workloads of one model size."""
    model = make_model(size)
    figures: dict[str, Runs] = {"params": Runs((float(sum(p.numel() for p in model.parameters())),))}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model.save_pretrained(folder)
        snapshot = WeightSnapshot("actor", 0, export_tensors(model), Path(folder))
        engine = TorchEngine(TorchEngineConfig(num_slots=BATCH, max_context=MAX_CONTEXT), snapshot)
        for kind in ("mixed", "equal"):
            work = make_workload(kind, num_requests)
            by_prompt = work.ordered([len(prompt) for prompt in work.prompts])
            by_output = work.ordered(work.outputs)
            runs = {
                "generate": lambda work=work: run_generate(model, work),
                "sorted": lambda work=by_prompt: run_generate(model, work),
                "static": lambda work=by_prompt: run_generate(model, work, cache="static"),
                "oracle": lambda work=by_output: run_generate(model, work),
                "engine": lambda work=work: run_engine(engine, work, runner),
            }
            interleaved(runs, repeats=1)
            seconds = interleaved(runs, repeats=repeats)
            for name, runs_s in seconds.items():
                figures[f"{name}_{kind}"] = Runs(tuple(sum(work.outputs) / s for s in runs_s.values))
        runner.run(engine.close())
    return figures


def main() -> None:
    """Measures, and prints the table and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    out: dict[str, object] = {}
    for size in args.sizes:
        figures = measure(size, args.requests, args.repeats)
        suffix = "" if size == "tiny" else f"_{size}"
        for kind in ("mixed", "equal"):
            speeds = {name: figures[f"{name}_{kind}"] for name in (*BASELINES, "oracle", "engine")}
            fastest = max(speeds[name].median for name in BASELINES)
            engine = speeds["engine"].median
            ratios = [engine / speeds["generate"].median, engine / fastest]
            rows.append([f"{size} ({figures['params'].median:,.0f})", kind, *speeds.values(), *ratios])
            out[f"speedup_{kind}{suffix}"] = round(ratios[0], 3)
            out[f"speedup_best_{kind}{suffix}"] = round(ratios[1], 3)
            out |= {f"{name}_{kind}{suffix}_tokens_per_s": speed for name, speed in speeds.items()}
    title = f"useful tokens/s, {args.requests} requests, {BATCH} at once, one thread"
    header = ["model (parameters)", "lengths", *BASELINES, "oracle", "engine", "/ generate", "/ best"]
    show_table(title, header, rows)
    report(out, at_least={"speedup_mixed": 2.5, "speedup_equal": 1.4})


if __name__ == "__main__":
    main()
