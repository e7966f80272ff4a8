"""Generates with vLLM for `real_engine.py`: in this process, with one thread, in vLLM's own environment.

    python vllm_side.py MODEL ROUNDS < WORK     # WORK is JSON: kind -> [[prompt, number of tokens], ...]

The last line is a JSON object: kind -> useful tokens per CPU second of each round. Each round drops what
earlier rounds cached of its prompts.
"""

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

Work = list[tuple[list[int], int]]
"""Prompts, each with the number of tokens to generate."""

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's CPU time is then this process's
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def main() -> None:
    """Measures all kinds of work."""
    model_dir, rounds = sys.argv[1], int(sys.argv[2])
    works: dict[str, Work] = json.load(sys.stdin)
    num_rows = max(map(len, works.values()))
    max_tokens = max(len(prompt) + count for work in works.values() for prompt, count in work)
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        model_dir, dtype="bfloat16", max_num_seqs=num_rows, max_model_len=max_tokens, enforce_eager=True
    )

    def generate(work: Work) -> int:
        params = [vllm.SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0) for _, n in work]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    found: dict[str, list[float]] = {}
    for kind, work in works.items():
        generate([(prompt, 4) for prompt, _ in work])
        found[kind] = []
        for _ in range(rounds):
            llm.reset_prefix_cache()
            began_s = time.process_time()
            num_tokens = generate(work)
            found[kind].append(num_tokens / (time.process_time() - began_s))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
