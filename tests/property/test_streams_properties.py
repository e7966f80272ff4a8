"""A stream's entries reach the loss with the tokens that they were recorded for, whatever lies in between."""

from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow import wire
from astraflow.dataflow.service.batch_slices import slice_indices
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.packing import cut_microbatches, cut_minibatches, make_layout
from astraflow.trainer.step_run import StepRun
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.types import AdvantageSpan, Batch, Generation, Sample, Stream
from drivers.trainer_builders import VOCAB_SIZE, make_batch, make_tiny_model

ACTOR = Speaker("actor", "actor", 1.0)
FIRST_ID = 1000
"""Every sampled token has an id of its own from here on, so that it can be told from all others."""
ANY_TOKEN = 2**31 - 1
USER = (7, 8)

TURN = st.tuples(st.integers(0, 1), st.integers(1, 4), st.booleans())
"""Which of two conversations goes on, how many tokens are sampled, whether its history is edited first."""
EPISODE = st.lists(TURN, min_size=1, max_size=4)
GROUPS = st.lists(st.lists(EPISODE, min_size=1, max_size=3), min_size=1, max_size=3)


def entries_of(token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each stream says of a sampled token."""
    return {
        "as_bytes": (token_ids % 251).to(torch.uint8),
        "as_floats": token_ids.to(torch.float32) / 2,
        "as_ints": (-3 * token_ids).to(torch.int32),
    }


def streams_of(token_ids: list[int]) -> tuple[Stream, ...]:
    columns = entries_of(torch.tensor(token_ids)).items()
    return tuple(
        Stream(name=name, dtype=str(column.numpy().dtype), data=column.numpy().tobytes())  # type: ignore[arg-type]
        for name, column in columns
    )


@dataclass
class Sampler:
    """Plays episodes and keeps what was sampled in them."""

    ids: "count[int]" = field(default_factory=lambda: count(FIRST_ID))

    def play(self, turns: list[tuple[int, int, bool]], *, group: int, episode: int) -> list[Sample]:
        """Samples of an episode; the engine records one stream, the workflow the others."""
        recorder = EpisodeRecorder()
        histories = [(20 + group,) * 5] * 2
        for conversation, num_tokens, is_edited in turns:
            history = histories[conversation][1 if is_edited else 0 :]
            prompt = (*history, *USER)
            ids = [next(self.ids) for _ in range(num_tokens)]
            engines, *workflows = streams_of(ids)
            generation = Generation(
                token_ids=tuple(ids),
                logprobs=(-1.0,) * num_tokens,
                versions=(0,) * num_tokens,
                finish_reason="stop",
                streams=(engines,),
            )
            completion_idx = recorder.record(ACTOR, conversation, prompt, generation)
            for stream in workflows:
                recorder.add_stream(completion_idx, stream)
            histories[conversation] = (*prompt, *ids)
        return [
            Sample(
                group_id=group,
                episode_idx=episode,
                task_id=f"t/{group}",
                trajectory=trajectory,
                advantages=tuple(AdvantageSpan(turn.start, turn.end, 1.0) for turn in trajectory.turns),
            )
            for trajectory in recorder.trajectories({}, {})
        ]


@pytest.fixture(scope="module")
def forward() -> TrainerForward:
    return TrainerForward(make_tiny_model(), vocab_size=VOCAB_SIZE, config=TorchBackendConfig())


@settings(deadline=None, max_examples=60)
@given(
    groups=GROUPS,
    world=st.integers(1, 3),
    num_minibatches=st.integers(1, 3),
    budget=st.integers(5, 200),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_entries_stay_with_their_tokens_through_forks_ranks_cuts_and_packing(
    forward: TrainerForward,
    groups: list[list[list[tuple[int, int, bool]]]],
    world: int,
    num_minibatches: int,
    budget: int,
    flags: tuple[bool, bool],
) -> None:
    sampler, (splits_groups, shares_prefixes) = Sampler(), flags
    samples = [
        sample
        for group, episodes in enumerate(groups)
        for episode, turns in enumerate(episodes)
        for sample in sampler.play(turns, group=group, episode=episode)
    ]
    sizes = [len(sample.trajectory.mask) for sample in samples]
    episodes_of = [(sample.group_id, sample.episode_idx) for sample in samples]
    seen: list[int] = []
    for positions in slice_indices(sizes, world, episodes_of):
        if not positions:
            continue
        sent = wire.encode(make_batch([samples[position] for position in positions]))
        columns = columns_from_samples(wire.decode(sent, Batch).samples, vocab_size=ANY_TOKEN)
        run = StepRun(columns=columns, trainer_version=0)
        for minibatch in cut_minibatches(
            columns.group_ids, num_minibatches, seed=world, split_groups=splits_groups
        ):
            for part in cut_microbatches(columns, minibatch, budget):
                packed = forward.tensors(make_layout(columns, part, share=shares_prefixes))
                inputs = run.inputs(packed.trained, torch.zeros(len(packed.trained)))
                expected = entries_of(packed.target_ids)
                assert inputs.streams.keys() == expected.keys()
                for name, column in expected.items():
                    assert inputs.streams[name].dtype == column.dtype
                    assert torch.equal(inputs.streams[name], column)
                seen += packed.target_ids.tolist()
    assert sorted(seen) == list(range(FIRST_ID, next(sampler.ids)))


@settings(deadline=None)
@given(turns=EPISODE)
def test_entries_are_0_where_nothing_is_trained(turns: list[tuple[int, int, bool]]) -> None:
    for sample in Sampler().play(turns, group=0, episode=0):
        mask = wire.array(sample.trajectory.mask, "uint8")
        for stream in sample.trajectory.streams:
            assert not np.any(wire.array(stream.data, stream.dtype)[mask == 0])
