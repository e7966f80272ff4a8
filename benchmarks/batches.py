"""Random training batches."""

import numpy as np

from astraflow import wire
from astraflow.types import AdvantageSpan, Batch, BatchTotals, Sample, Trajectory, VersionSpan

__all__ = ["make_batch", "make_samples"]


def make_samples(
    num_groups: int, *, num_prompt: int, num_sampled: int, vocab_size: int, group_size: int = 1, part: int = 0
) -> list[Sample]:
    """Makes groups of samples that share a prompt.

    `part`: which part of a batch they are, if it has several of this size.
    """
    rng = np.random.default_rng(part)
    mask = np.arange(num_prompt + num_sampled) >= num_prompt
    samples: list[Sample] = []
    for group in range(part * num_groups, (part + 1) * num_groups):
        prompt = rng.integers(2, vocab_size, num_prompt)
        for _ in range(group_size):
            ids = np.concatenate([prompt, rng.integers(2, vocab_size, num_sampled)])
            trajectory = Trajectory(
                policy="actor",
                role="actor",
                token_ids=wire.column(ids, "int32"),
                mask=wire.column(mask, "uint8"),
                behavior_logprobs=wire.column(np.where(mask, -np.log(vocab_size), 0.0), "float32"),
                versions=(VersionSpan(num_prompt, num_sampled, 0),),
                temperature=1.0,
                finish_reason="stop",
                turns=(),
                reward=0.0,
            )
            span = AdvantageSpan(num_prompt, len(ids), float(rng.normal()))
            sample = Sample(
                group_id=group,
                episode_idx=len(samples),
                task_id="t",
                trajectory=trajectory,
                advantages=(span,),
            )
            samples.append(sample)
    return samples


def make_batch(samples: list[Sample], step: int, *, rank: int = 0, world: int = 1) -> Batch:
    """Makes a rank's slice of a batch, of which each rank has as many samples."""
    num = len(samples) * world
    totals = BatchTotals(
        num_groups=num, num_samples=num, num_tokens=0, num_trained_tokens=0, advantage_sum=0.0,
        advantage_square_sum=0.0, reward_sum=0.0,
    )  # fmt: skip
    return Batch(
        policy="actor", step=step, rank=rank, world=world, samples=tuple(samples), totals=totals,
        trainer_version=step, staleness_mean=0.0, staleness_max=0,
    )  # fmt: skip
