"""Measures how many tokens the torch engine generates per CPU second, one thread.

    equal     8 prompts of 45 tokens with 8 completions of 32 tokens each, as in groups of `real/words`
    mixed     64 distinct prompts of 16 to 128 tokens, and completions of 8 to 96 tokens

    engine    the torch engine, which also computes logprobs
    generate  `model.generate` with a dynamic cache: one batch of 64 rows, padded on the left, until its
              longest completion is done
    vllm      vLLM's CPU build without compilation; only if `.venv-vllm` exists (`make .venv-vllm`)
    beside    the engine of the checkout given by `--beside`, in its own environment

    speedup_KIND          useful tokens per CPU second of `engine`, divided by those of `generate`
    speedup_SIDE_KIND     the same, divided by those of another side
    error_ratio           mean distance of the engine's logprobs from those of the model in float32, divided
                          by the same distance of the model's own forward pass

With `--turns`, it measures conversations instead. In each turn, the prompt is the history, 16 tokens are
generated, and 12 are added to the history.

    fits         8 conversations of 64 turns on 16 slots
    crowded      16 conversations of 32 turns on 8 slots
    stripped     8 conversations of 32 turns on 16 slots; half of each completion is left out of the history

    prefill_frac_KIND     computed tokens of prompts, with padding, divided by the lengths of the histories
    cpu_s_KIND            CPU seconds per conversation
    cpu_speedup_KIND      the same of `beside`, divided by those of `engine`

Each run is a child process that loads the model, warms up, and then times `--rounds` rounds. The runs of all
sides alternate `--repeats` times. `--model tiny` makes a random model of the quickstart's size, in float32.
The default, models/smollm2 (135 million parameters, in bfloat16), must exist: `astraflow model fetch
smollm2`. The targets are for this model.
"""

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from astraflow.rollout.engines.torch_engine import TorchEngine
    from astraflow.types import Generation

# vLLM's environment, in which one side runs this file, has neither AstraFlow nor psutil.

_ROWS = 64
_CONTEXT = 256
_TINY = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip
_PYTHON_OF_VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm" / "bin" / "python"
_KINDS = ("equal", "mixed")
_AT_LEAST = {
    "speedup_equal": 2.0,
    "speedup_mixed": 3.0,
    "speedup_vllm_equal": 1.5,
    "speedup_vllm_mixed": 1.5,
    "speedup_beside_equal": 0.97,
    "speedup_beside_mixed": 0.97,
}
_TURNS = {"fits": (8, 16, 64), "crowded": (16, 8, 32), "stripped": (8, 16, 32)}
"""Conversations, slots, and turns."""
_AT_MOST = {"prefill_frac_fits": 0.5, "prefill_frac_crowded": 0.8, "prefill_frac_stripped": 1.2}
_ENVIRONMENT_OF_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's CPU time is then this process's
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}

Work = list[tuple[list[int], int]]
"""Prompts, each with the number of tokens to generate."""


def main() -> None:
    """Measures all sides; the last line has the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="`tiny`, or the folder of a model")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--turns", action="store_true", help="measure conversations")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_SIDES[options.one](options.model, options.rounds)))
        return
    with tempfile.TemporaryDirectory(prefix="astraflow-engine-") as folder:
        if options.model == "tiny":
            options.model = _make_tiny(folder)
        if not Path(options.model).is_dir():
            parser.error(f"{options.model} does not exist; run `astraflow model fetch smollm2` first")
        (_compare_turns if options.turns else _compare)(options)


def _compare_turns(options: argparse.Namespace) -> None:
    from harness import report, show_table

    figures = _in_child("turns", options)
    others = _in_child("turns", options, is_beside=True) if options.beside else {}
    rows = [[name, value, others.get(name)] for name, value in figures.items()]
    show_table("conversations", ["figure", "engine", "beside"], rows)
    ratios = {f"cpu_speedup_{k}": others[f"cpu_s_{k}"] / figures[f"cpu_s_{k}"] for k in _TURNS if others}
    figures |= ratios | {f"beside_{name}": value for name, value in others.items()}
    is_real = others and _dtype(options.model) == "bfloat16"
    report(figures, at_least={"cpu_speedup_crowded": 2.0} if is_real else {}, at_most=_AT_MOST)


def _compare(options: argparse.Namespace) -> None:
    from harness import Runs, report, show_table

    others = {"vllm": _PYTHON_OF_VLLM.exists(), "beside": bool(options.beside)}
    sides = ["engine", "generate", *(side for side, is_there in others.items() if is_there)]
    speeds: dict[str, dict[str, list[float]]] = {side: {kind: [] for kind in _KINDS} for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            for kind, values in _in_child(side, options).items():
                speeds[side][kind] += values
    figures: dict[str, Any] = {}
    for side in sides:
        figures |= {f"{side}_{kind}": Runs(tuple(speeds[side][kind])) for kind in _KINDS}
    for kind in _KINDS:
        ours = figures[f"engine_{kind}"].median
        for side in sides[1:]:
            name = f"speedup_{kind}" if side == "generate" else f"speedup_{side}_{kind}"
            figures[name] = ours / figures[f"{side}_{kind}"].median
    figures |= _in_child("errors", options)
    rows = [[side, *(figures[f"{side}_{kind}"] for kind in _KINDS)] for side in sides]
    show_table("useful tokens per CPU second", ["side", *_KINDS], rows)
    bounds = _AT_LEAST if _dtype(options.model) == "bfloat16" else {}
    report(figures, at_least=bounds, at_most={"error_ratio": 1.0})


def _in_child(side: str, options: argparse.Namespace, *, is_beside: bool = False) -> dict[str, Any]:
    python, environment = sys.executable, dict(os.environ)
    if is_beside or side == "beside":
        python, side = str(options.beside / ".venv" / "bin" / "python"), side.replace("beside", "engine")
    if side == "vllm":
        python, environment = str(_PYTHON_OF_VLLM), environment | _ENVIRONMENT_OF_VLLM
    command = [python, __file__, "--one", side, "--model", options.model, "--rounds", str(options.rounds)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# --- models and work ------------------------------------------------------------------------------


def _make_tiny(folder: str) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**_TINY)).save_pretrained(folder)
    return folder


def _config(model_dir: str) -> dict[str, Any]:
    return json.loads((Path(model_dir) / "config.json").read_text())


def _dtype(model_dir: str) -> str:
    """Returns bfloat16, or float32 for a tiny model, which is faster with it."""
    return "float32" if _config(model_dir)["hidden_size"] < 128 else "bfloat16"


def _work(kind: str, vocab_size: int) -> Work:
    rng = np.random.default_rng(0)
    if kind == "equal":
        prompts = [rng.integers(3, vocab_size, 45).tolist() for _ in range(8)]
        return [(prompts[row // 8], 32) for row in range(_ROWS)]
    lengths = rng.integers(16, 129, _ROWS)
    return [(rng.integers(3, vocab_size, n).tolist(), int(rng.integers(8, 97))) for n in lengths]


def _speeds(model_dir: str, rounds: int, run: Callable[[Work], int]) -> dict[str, list[float]]:
    """Returns the useful tokens per CPU second of each round, for each kind of work."""
    speeds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for kind in _KINDS:
        work = _work(kind, _config(model_dir)["vocab_size"])
        run([(prompt, 4) for prompt, _ in work])
        for _ in range(rounds):
            began_s = time.process_time()
            num_tokens = run(work)
            speeds[kind].append(num_tokens / (time.process_time() - began_s))
    return speeds


# --- sides ----------------------------------------------------------------------------------------


def _generate_speeds(model_dir: str, rounds: int) -> dict[str, list[float]]:
    import torch

    from astraflow.models.loading import load_causal_lm

    torch.set_num_threads(1)
    model: Any = load_causal_lm(model_dir, dtype=_dtype(model_dir))

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

    return _speeds(model_dir, rounds, run)


def _vllm_speeds(model_dir: str, rounds: int) -> dict[str, list[float]]:
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model_dir, dtype="bfloat16", max_num_seqs=_ROWS, max_model_len=_CONTEXT, enforce_eager=True
    )

    def run(work: Work) -> int:
        llm.reset_prefix_cache()  # of earlier rounds
        params = [vllm.SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0) for _, n in work]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return _speeds(model_dir, rounds, run)


def _engine_speeds(model_dir: str, rounds: int) -> dict[str, list[float]]:
    from astraflow.service.process import settle_memory

    with asyncio.Runner() as runner:
        engine = _make_engine(model_dir)
        settle_memory()  # as a rollout service does

        def run(work: Work) -> int:
            return sum(len(generation.token_ids) for generation in runner.run(_run(engine, work)))

        speeds = _speeds(model_dir, rounds, run)
        runner.run(engine.close())
    return speeds


def _make_engine(model_dir: str, num_slots: int = _ROWS, max_context: int = _CONTEXT) -> "TorchEngine":
    import torch

    from astraflow.models.loading import export_tensors, load_causal_lm
    from astraflow.rollout.engine_config import TorchEngineConfig
    from astraflow.rollout.engines.torch_engine import TorchEngine
    from astraflow.types.host_tensors import WeightSnapshot

    dtype: Any = _dtype(model_dir)
    model: Any = load_causal_lm(model_dir, dtype=dtype)
    torch.set_num_threads(1)
    config = TorchEngineConfig(num_slots=num_slots, max_context=max_context, dtype=dtype, num_threads=1)
    return TorchEngine(config, WeightSnapshot("actor", 0, export_tensors(model), Path(model_dir)))


async def _run(engine: "TorchEngine", work: Work) -> "list[Generation]":
    from astraflow.types import GenerateRequest, Sampling

    requests = [
        GenerateRequest(token_ids=tuple(prompt), sampling=Sampling(max_tokens=count, seed=idx))
        for idx, (prompt, count) in enumerate(work)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def _turns(model_dir: str, rounds: int) -> dict[str, float]:
    del rounds
    figures: dict[str, float] = {}
    for kind, (_, num_slots, num_turns) in _TURNS.items():
        with asyncio.Runner() as runner:
            engine = _make_engine(model_dir, num_slots, 164 + 28 * num_turns)
            forward: Any = engine.lanes.live.lane._forward
            counts: list[int] = []
            forward.prefill = partial(_counted, counts, forward.prefill)
            forward.extend = partial(_counted, counts, forward.extend)
            began_s = time.process_time()
            lengths = runner.run(_converse(engine, kind))
            figures[f"prefill_frac_{kind}"] = sum(counts) / sum(lengths)
            figures[f"cpu_s_{kind}"] = (time.process_time() - began_s) / len(lengths)
            runner.run(engine.close())
    return figures


def _counted(counts: list[int], call: Callable[..., None], tokens: Any, *rest: Any) -> None:
    counts.append(tokens.numel())
    call(tokens, *rest)


async def _converse(engine: "TorchEngine", kind: str) -> list[int]:
    """Returns the lengths of the histories."""
    from astraflow.types import GenerateRequest, Sampling

    count, _, num_turns = _TURNS[kind]

    async def talk(seed: int) -> int:
        rng = np.random.default_rng(seed)
        history: list[int] = rng.integers(3, 60, 100).tolist()
        for turn in range(num_turns):
            sampling = Sampling(max_tokens=16, seed=seed * num_turns + turn)
            reply = await engine.generate(GenerateRequest(token_ids=tuple(history), sampling=sampling))
            history += [*reply.token_ids[8 if kind == "stripped" else 0 :], *rng.integers(3, 60, 12).tolist()]
            await asyncio.sleep(0.01 * rng.exponential())
        return len(history)

    return await asyncio.gather(*map(talk, range(count)))


def _errors(model_dir: str, rounds: int) -> dict[str, float]:
    del rounds
    work = _work("mixed", _config(model_dir)["vocab_size"])[:16]
    with asyncio.Runner() as runner:
        engine = _make_engine(model_dir)
        generations = runner.run(_run(engine, work))
        runner.run(engine.close())
    texts = [(prompt, generation) for (prompt, _), generation in zip(work, generations, strict=True)]
    logprobs = partial(_module_logprobs, model_dir, texts)
    exact, rounded = logprobs("float32"), logprobs(_dtype(model_dir))
    error = float(np.abs(np.concatenate([each.logprobs for each in generations]) - exact).mean())
    module_error = float(np.abs(rounded - exact).mean())
    ratio = {"error_ratio": error / module_error} if module_error else {}  # none: the model is in float32
    return {"logprob_error": error, "module_logprob_error": module_error, **ratio}


def _module_logprobs(model_dir: str, texts: "list[tuple[list[int], Generation]]", dtype: Any) -> Any:
    import torch

    from astraflow.models.loading import load_causal_lm

    model: Any = load_causal_lm(model_dir, dtype=dtype)
    logprobs: list[Any] = []
    for prompt, generation in texts:
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        logprobs.append(torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.concatenate(logprobs)


_SIDES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "engine": _engine_speeds,
    "generate": _generate_speeds,
    "vllm": _vllm_speeds,
    "errors": _errors,
    "turns": _turns,
}


if __name__ == "__main__":
    main()
