"""Makes one run of TRL's GRPOTrainer for a race (`race.py`), in TRL's own virtual environment.

The program reads a job (JSON), trains, and leaves weights and `result.json` in the job's folder. The clock
starts when the first step begins, after imports and after model, data, and trainer are ready. The clock is
stopped while the weights of a version are copied. Nothing is evaluated here.

    python trl_side.py JOB.json
"""

import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["PACKAGES", "StopRule", "TrlJob", "TrlResult", "run_job", "weights_file"]

PACKAGES = (
    "trl==1.16.*",
    "transformers",
    "datasets",
    "safetensors",
    "msgspec",
    "numpy",
    "pydantic",
    "pyyaml",
    "reasoning-gym",
)


class StopRule(msgspec.Struct, frozen=True, kw_only=True):
    """Decides when a run of either side ends: its training reward stays high, or `max_steps` are done.

    The rule only ends runs that are well past the target. The result is determined later, by evaluation.
    """

    reward: float
    window: int
    """Steps over which the training reward is averaged."""
    max_steps: int

    def is_over(self, rewards: Sequence[float]) -> bool:
        """Checks whether a run with these mean rewards, one per step, ends now."""
        recent = rewards[-self.window :]
        is_high = len(recent) == self.window and sum(recent) / self.window >= self.reward
        return is_high or len(rewards) >= self.max_steps


class TrlJob(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run needs. All values that have a counterpart in a recipe come from the recipe."""

    model_dir: str
    tasks_file: str
    """File with one task per line, as `wire` encodes it in JSON."""
    reward: str
    """JSON of the recipe's section `tasks`, from which the reward is made."""
    out_dir: str
    stop: StopRule
    seed: int
    lr: float
    warmup_steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    group_size: int
    groups_per_batch: int
    minibatches: int
    clip_low: float
    clip_high: float
    max_tokens: int
    temperature: float
    num_threads: int
    is_tuned: bool = False
    """Puts prompts of one length together in a step, and uses a static cache of keys and values."""
    has_autocast: bool = False
    """Computes in bfloat16; the weights stay in float32."""
    is_compact: bool = False
    """Scores only the positions of completions. On a CPU, TRL does so only if it finds Triton."""
    has_vllm: bool = False
    """Generates with vLLM in this process."""
    max_context: int = 0
    """Largest number of tokens of a prompt and its completion, for vLLM."""
    keep_every: int = 1
    """Keeps the weights of every so many versions."""


class TrlResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. `times_s[i]` is when version `i + 1` was ready."""

    times_s: list[float]
    cpu_s: list[float]
    """CPU time of the process, all threads, at these times."""
    rewards: list[float]
    """Mean training reward of each step."""


def weights_file(out_dir: Path, version: int) -> Path:
    """Returns the file in which a run leaves the weights of a version (safetensors)."""
    return out_dir / f"version-{version}.safetensors"


def run_job(python: Path, job: TrlJob, source_dir: Path) -> TrlResult:
    """Runs a job in TRL's environment; our package is found in `source_dir`, and its recipes
    next to that. A failure ends the program."""
    out_dir = Path(job.out_dir)
    job_file = out_dir / "job.json"
    log_file = out_dir / "log.txt"
    job_file.write_bytes(msgspec.json.encode(job))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}
    env = {
        **os.environ,
        **offline,
        "PYTHONPATH": f"{source_dir}{os.pathsep}{source_dir.parent}",
        "PYTHONWARNINGS": "ignore",
    }
    env["OMP_NUM_THREADS"] = str(job.num_threads)
    env.pop("OMP_WAIT_POLICY", None)  # passive waits slow down a process that owns all cores
    with log_file.open("wb") as log:
        command = [str(python), str(Path(__file__).resolve()), str(job_file)]
        done = subprocess.run(command, stdout=log, stderr=log, env=env)
    if done.returncode:
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"TRL ended with {done.returncode}; the end of {log_file}:\n{tail}")
    return msgspec.json.decode((out_dir / "result.json").read_bytes(), type=TrlResult)


def train(job: TrlJob) -> TrlResult:
    """Trains with GRPOTrainer.

    As in a recipe, a step has `groups_per_batch` groups, and `minibatches` optimizer steps on them. `bnpo`
    divides by the tokens of the minibatch, as the recipe's `denominator: tokens` does. Optimizer and warm-up
    are built here, because the library's own schedule begins with a step of learning rate 0.
    """
    import torch

    torch.set_num_threads(job.num_threads)
    import datasets
    import transformers
    import trl

    if job.is_compact:
        import trl.trainer.utils as trl_utils

        trl_utils._use_triton = lambda _device: True
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model_dir)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.lr, betas=job.betas, eps=job.eps, weight_decay=job.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, (update + 1) / max(1, job.warmup_steps))
    )
    rows = _rows(job)
    reward = _Reward(job)
    recorder = _make_recorder(job, reward)
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=_settings(job),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[recorder],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    return TrlResult(times_s=recorder.times_s, cpu_s=recorder.cpu_s, rewards=reward.means)


def _settings(job: TrlJob) -> Any:
    """Makes the trainer's settings. Settings that are not listed have no counterpart, or changing them was
    slower on a CPU."""
    import trl

    samples = job.groups_per_batch * job.group_size
    return trl.GRPOConfig(
        output_dir=str(Path(job.out_dir) / "trainer"),
        seed=job.seed,
        use_cpu=True,
        bf16=job.has_autocast,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // job.minibatches,
        gradient_accumulation_steps=1,
        steps_per_generation=job.minibatches,
        num_iterations=1,
        num_generations=job.group_size,
        max_steps=job.stop.max_steps * job.minibatches,
        max_completion_length=job.max_tokens,
        temperature=job.temperature,
        beta=0.0,
        epsilon=job.clip_low,
        epsilon_high=job.clip_high,
        loss_type="bnpo",
        scale_rewards="group",
        max_grad_norm=job.max_grad_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        # The rows of a tuned job have their own order.
        shuffle_dataset=not job.is_tuned,
        cache_implementation="static" if job.is_tuned else None,
        use_vllm=job.has_vllm,
        vllm_mode="colocate",
        vllm_max_model_length=job.max_context or None,
    )


class _Reward:
    """The recipe's own reward, called in this process. Keeps the mean of each step."""

    __name__ = "recipe"

    def __init__(self, job: TrlJob) -> None:
        from astraflow.tasks.config import TasksConfig
        from astraflow.tasks.rewards import make_reward

        self._score = make_reward(TasksConfig.model_validate_json(job.reward))
        self._tasks = _load_tasks(job.tasks_file)
        self.means: list[float] = []

    def __call__(self, completions: list[Any], task_idx: list[int], **_: object) -> list[float]:
        scores = [
            self._score(self._tasks[idx], completion[0]["content"])
            for idx, completion in zip(task_idx, completions, strict=True)
        ]
        self.means.append(sum(scores) / len(scores))
        return scores


def _load_tasks(path: str) -> list[Any]:
    from astraflow.types import Task

    return [msgspec.json.decode(line, type=Task) for line in Path(path).read_bytes().splitlines()]


def _rows(job: TrlJob) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for idx, task in enumerate(_load_tasks(job.tasks_file)):
        context = [{"role": m.role, "content": m.content} for m in task.context]
        rows.append({"prompt": [*context, {"role": "user", "content": task.prompt}], "task_idx": idx})
    return _by_length(rows, job) if job.is_tuned else rows


def _by_length(rows: list[dict[str, Any]], job: TrlJob) -> list[dict[str, Any]]:
    """Sorts the rows so that those of a step have nearly the same length, and padding costs little."""
    rng = random.Random(job.seed)
    rng.shuffle(rows)
    rows.sort(key=lambda row: sum(len(message["content"]) for message in row["prompt"]))
    num = job.groups_per_batch
    steps = [rows[start : start + num] for start in range(0, len(rows) - num + 1, num)]
    rng.shuffle(steps)
    return [row for step in steps for row in step]


def _make_recorder(job: TrlJob, reward: _Reward) -> Any:
    """Makes a callback that owns the clock and keeps the weights of each version."""
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.times_s: list[float] = []
            self.cpu_s: list[float] = []
            self._saving_cpu_s = 0.0
            self._began_s = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                self._began_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % job.minibatches:
                return
            paused_s = time.perf_counter()
            paused_cpu_s = time.process_time()
            self.times_s.append(paused_s - self._began_s)
            self.cpu_s.append(paused_cpu_s - self._saving_cpu_s)
            if len(self.times_s) % job.keep_every == 0:
                self._save(kwargs["model"])
            control.should_training_stop = job.stop.is_over(reward.means)
            self._began_s += time.perf_counter() - paused_s
            self._saving_cpu_s += time.process_time() - paused_cpu_s

        def _save(self, model: Any) -> None:
            # A tied head is in the state under two names.
            tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if model.config.tie_word_embeddings:
                tensors.pop("lm_head.weight", None)
            save_file(tensors, weights_file(Path(job.out_dir), len(self.times_s)))

    return Recorder()


def main() -> None:
    """Runs the job of the command line."""
    if len(sys.argv) != 2:
        print("nothing to do: race.py starts this file with a job")
        return
    warnings.simplefilter("ignore")
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrlJob)
    result = train(job)
    Path(job.out_dir, "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
