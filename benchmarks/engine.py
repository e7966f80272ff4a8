"""Generation speed of the torch engine against `model.generate` with padded batches, one thread.

Useful tokens are those that were asked for. The baseline takes the requests in order, in batches of 64,
pads the prompts on the left and generates until the longest request of the batch is done; it computes no
logprobs, the engine does. Prompts are distinct, so nothing is gained here by sharing them within groups.

    python benchmarks/engine.py [--repeats 3] [--requests 192]
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.host_tensors import WeightSnapshot
from astraflow.models.loading import export_tensors
from astraflow.rollout.config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Sampling
from harness import interleaved, report, show_table

VOCAB = 64
BATCH = 64
MAX_CONTEXT = 512
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4},
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "num_attention_heads": 4},
}


@dataclass(frozen=True)
class Workload:
    """Prompts and the number of tokens that each asks for."""

    prompts: list[tuple[int, ...]]
    outputs: list[int]


def make_workload(kind: str, num_requests: int) -> Workload:
    """`mixed`: prompts of 16-256 tokens, outputs of 8-256, uniform. `equal`: 136 and 132, the same means."""
    rng = np.random.default_rng(0)
    if kind == "mixed":
        prompts = rng.integers(16, 257, num_requests)
        outputs = rng.integers(8, 257, num_requests)
    else:
        prompts = np.full(num_requests, 136)
        outputs = np.full(num_requests, 132)
    return Workload([tuple(rng.integers(2, VOCAB, n).tolist()) for n in prompts], outputs.tolist())


def make_model(size: str) -> Any:
    """A random model of the quickstart's architecture, without an end-of-text token."""
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


def run_generate(model: Any, work: Workload) -> None:
    """The baseline."""
    for start in range(0, len(work.prompts), BATCH):
        prompts = work.prompts[start : start + BATCH]
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        new = max(work.outputs[start : start + BATCH])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0
            )
        assert out.shape[1] == longest + new


def run_engine(engine: TorchEngine, work: Workload, runner: asyncio.Runner) -> None:
    """All requests at once; the engine runs 64 of them at a time."""

    async def main() -> None:
        requests = [
            GenerateRequest(token_ids=prompt, sampling=Sampling(max_tokens=count, seed=i))
            for i, (prompt, count) in enumerate(zip(work.prompts, work.outputs, strict=True))
        ]
        generations = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [len(g.token_ids) for g in generations] == work.outputs

    runner.run(main())


def measure(size: str, num_requests: int, repeats: int) -> dict[str, float]:
    """Tokens/s of both, for both workloads of one size of model."""
    model = make_model(size)
    figures: dict[str, float] = {"params": float(sum(p.numel() for p in model.parameters()))}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model.save_pretrained(folder)
        snapshot = WeightSnapshot("actor", 0, export_tensors(model), Path(folder))
        engine = TorchEngine(TorchEngineConfig(num_slots=BATCH, max_context=MAX_CONTEXT), snapshot)
        for kind in ("mixed", "equal"):
            work = make_workload(kind, num_requests)
            runs = {
                "generate": lambda work=work: run_generate(model, work),
                "engine": lambda work=work: run_engine(engine, work, runner),
            }
            interleaved(runs, repeats=1)
            seconds = interleaved(runs, repeats=repeats)
            for name, value in seconds.items():
                figures[f"{name}_{kind}"] = sum(work.outputs) / value
            figures[f"speedup_{kind}"] = seconds["generate"] / seconds["engine"]
        runner.run(engine.close())
    return figures


def main() -> None:
    """Measures, prints the table and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    out: dict[str, float] = {}
    for size in args.sizes:
        figures = measure(size, args.requests, args.repeats)
        suffix = "" if size == "tiny" else f"_{size}"
        for kind in ("mixed", "equal"):
            values = [figures[f"{name}_{kind}"] for name in ("generate", "engine", "speedup")]
            rows.append([f"{size} ({figures['params']:,.0f})", kind, *values])
            out[f"speedup_{kind}{suffix}"] = round(values[2], 3)
            out[f"generate_{kind}{suffix}_tokens_per_s"] = round(values[0])
            out[f"engine_{kind}{suffix}_tokens_per_s"] = round(values[1])
    title = (
        f"useful tokens/s, {args.requests} requests, {BATCH} at once, one thread, median of {args.repeats}"
    )
    show_table(title, ["model (parameters)", "lengths", "generate", "engine", "ratio"], rows)
    report(out)


if __name__ == "__main__":
    main()
