"""Performs the training steps of a policy with the loss of its recipe, using a backend's operations.

A step does the following, in order:

1. Check the samples, and score them with the frozen models.
2. With a critic, compute its values, and the advantages from them.
3. With several minibatches and a loss that reads proximal logprobs, compute these for all minibatches but the
   first, whose current logprobs are the proximal ones.
4. For each minibatch, run a forward and a backward pass, one optimizer step of the policy, then one of the
   critic.

Samples whose advantages are all 0 count in every denominator. They are not computed if their gradient is
known to be 0; metrics of tokens then cover only the computed ones. Samples that a rule set to zero
(`Sample.zeroed_by`) are left out before step 1, so they count in no denominator and in no statistic.

This module decides what is computed, and the backend decides how, so another backend repeats none of this.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from astraflow.errors import TrainingError, WireError
from astraflow.losses.config import ValueModelConfig
from astraflow.losses.factory import make_loss
from astraflow.protocols import (
    AdamStep,
    ModelRole,
    SampleRulesProvider,
    StepMetricsReporter,
    StepResult,
    TrainerBackend,
    Write,
)
from astraflow.trainer.columns import TEACHER_STREAM, columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.objective import PolicyObjective, ValueObjective, sample_names
from astraflow.trainer.packing import cut_minibatches, samples_with_advantage
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.step import denominator, learning_rate, shuffle_seed
from astraflow.trainer.step_run import Minibatch, StepRun, statistics_inputs, with_bounded_ratios
from astraflow.types import Batch, Sample, SampleRules, StreamRule
from astraflow.types.host_tensors import HostTensor
from astraflow.types.token_columns import Columns

__all__ = ["LossLearner", "frozen_roles"]

_MIN_TEACHER_LOGPROB = -1e6
"""The bound of every logprob on the wire: a teacher may consider a token impossible."""


def frozen_roles(config: TrainConfig) -> tuple[ModelRole, ...]:
    """The frozen models that score the batches of a recipe."""
    roles: list[ModelRole] = []
    if config.auxiliary.has_reference:
        roles.append("reference")
    if config.auxiliary.teacher:
        roles.append("teacher")
    return tuple(roles)


class LossLearner:
    """Implements `Learner`. Not thread-safe: one caller at a time.

    Example: `LossLearner(config, TorchBackend(config, model_dir="models/tiny"), seed=0).train_step(batch)`.
    """

    def __init__(
        self, config: TrainConfig, backend: TrainerBackend, *, seed: int = 0, ranks: Ranks = ALONE
    ) -> None:
        """Raises: ConfigError for a bad loss."""
        self._ranks = ranks
        self.num_steps_done = 0
        self._config = config
        self.backend = backend
        """The backend that computes."""
        self._seed = seed
        self._loss = make_loss(config.loss, config.auxiliary)
        critic = config.auxiliary.critic
        self._critic = critic if isinstance(critic, ValueModelConfig) else None
        self._frozen = frozen_roles(config)
        # Images are checked when a pass is laid out.
        self._column_rules = msgspec.structs.replace(self.sample_rules, images=msgspec.UNSET)
        self._may_skip = self._loss.needs_advantage and not self._frozen and self._critic is None

    @property
    def sample_rules(self) -> SampleRules:
        """What the backend and the loss need of each trajectory."""
        backend = self.backend
        known = (
            backend.sample_rules
            if isinstance(backend, SampleRulesProvider)
            else SampleRules(vocab_size=backend.vocab_size)
        )
        needs_teacher = self._loss.needs_teacher and "teacher" not in self._frozen
        teacher = StreamRule(name=TEACHER_STREAM, low=_MIN_TEACHER_LOGPROB, high=1.0, is_needed=needs_teacher)
        streams = {rule.name: rule for rule in (teacher, *known.streams, *self._loss.streams)}
        if name := self._loss.alternatives:  # they are token ids
            most = self.backend.vocab_size - 1
            streams[name] = msgspec.structs.replace(streams[name], low=0, high=most)
        return msgspec.structs.replace(known, streams=tuple(streams.values()))

    def train_step(self, batch: Batch) -> StepResult:
        """Performs all optimizer steps of one batch.

        Raises: WireError if the samples are malformed; TrainingError, naming the groups, if a number is not
        finite, or if the batch is not that of the next step. The model must then not be used any more.
        """
        if batch.step != self.num_steps_done:
            raise TrainingError(
                f"got the batch of step {batch.step + 1}, expected step {self.num_steps_done + 1}"
            )
        samples, untrained_frac = self._trained_samples(batch.samples)
        columns = columns_from_samples(
            samples,
            vocab_size=self.backend.vocab_size,
            rules=self._column_rules,
            is_slice=self._ranks.world > 1,
        )
        run = StepRun(
            columns=columns,
            trainer_version=batch.trainer_version,
            ranks=self._ranks,
            needs_proximal=self._loss.needs_proximal,
            untrained_frac=untrained_frac,
        )
        with run.time_phase("pack_s"):
            minibatches = self._minibatches(columns)
        self._score_frozen(run)
        if self._critic is not None:
            with run.time_phase("values_s"):
                parts = self.backend.cut(columns, _all_by_group(columns), model="critic")
                values = self.backend.values(columns, parts)
            run.estimate(values, self._critic, self._config.auxiliary.kl)
        if self._loss.needs_proximal:
            with run.time_phase("proximal_s"):
                for minibatch in minibatches[1:]:
                    run.note_start(*self._current(run, minibatch))
        for idx, minibatch in enumerate(minibatches):
            with run.time_phase("forward_backward_s"):
                self._forward_backward(run, minibatch, is_first=idx == 0)
            with run.time_phase("optim_s"):
                self._optim_step(run, minibatch, batch.step * self._config.minibatches + idx)
        self.num_steps_done += 1
        further: Mapping[str, float] = {}
        if isinstance(self.backend, StepMetricsReporter):
            further = self.backend.step_metrics()
        return StepResult(metrics=run.metrics(len(minibatches), further))

    def export(self) -> Iterable[HostTensor]:
        """The backend's weights."""
        return self.backend.export()

    def save(self, folder: Path) -> Write:
        """Copies the backend's state and the number of steps done. Returns the function that writes the
        copy."""
        return self.backend.save(folder, num_steps_done=self.num_steps_done)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises: DataError if the folder does not fit the model."""
        self.num_steps_done = self.backend.load(folder)

    def _trained_samples(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], float]:
        """This rank's samples without those that a rule set to zero, and the share of these in the batch.

        If no rank has others, the result is all samples: the step must happen, though it trains nothing.
        """
        zeroing = {"filter", "credit"} if self._loss.compares else {"filter"}
        trained = [sample for sample in samples if sample.zeroed_by not in zeroing]
        counts = self._ranks.gather_values((len(trained), len(samples)))
        num_trained, num_samples = (sum(kind) for kind in zip(*counts, strict=True))
        return (trained if num_trained else samples), 1 - num_trained / max(1, num_samples)

    def _minibatches(self, columns: Columns) -> list[Minibatch]:
        cut = self._own_minibatches(columns)
        computed = [samples_with_advantage(columns, samples) for samples in cut] if self._may_skip else cut
        num_computed = _sums(self._ranks.gather_values([[len(samples)] for samples in computed]))
        # A minibatch in which no sample has an advantage is computed completely: its step must still happen.
        chosen = [some if num else own for (num,), some, own in zip(num_computed, computed, cut, strict=True)]
        parts = [self.backend.cut(columns, samples) for samples in chosen]
        own_counts = [
            (len(own), columns.num_trained(samples), len(samples), columns.num_episodes(samples))
            for samples, own in zip(cut, parts, strict=True)
        ]
        counts = _sums(self._ranks.gather_values(own_counts))
        minibatches = [Minibatch(*one) for one in zip(cut, parts, counts, strict=True)]
        filled = [minibatch for minibatch in minibatches if minibatch.num_parts]
        if not filled:
            raise WireError("none of the batch's samples has a trained token")
        return filled

    def _own_minibatches(self, columns: Columns) -> list[np.ndarray]:
        """This rank's samples of each minibatch. The minibatches do not depend on the number of ranks."""
        whole = self._ranks.gather_column
        groups = whole(columns.group_ids)
        # The order by group and episode is the same however the batch is sliced for the ranks.
        order = np.lexsort((whole(columns.episode_idx), groups))
        cut = cut_minibatches(
            groups[order],
            self._config.minibatches,
            seed=shuffle_seed(self._seed, self.num_steps_done),
            split_groups=self._config.optimizer.split_groups,
        )
        sizes = self._ranks.gather_values(len(columns.lengths))
        first = sum(sizes[: self._ranks.rank])
        own = [order[part] - first for part in cut]
        return [part[(part >= 0) & (part < len(columns.lengths))] for part in own]

    def _score_frozen(self, run: StepRun) -> None:
        """Computes the logprobs of the reference and the teacher, and applies the KL penalty to the
        reward."""
        columns = run.columns
        run.teacher = columns.streams.get(TEACHER_STREAM)
        for role in self._frozen:
            with run.time_phase(f"{role}_s"):
                parts = self.backend.cut(columns, _all_by_group(columns), model=role)
                logprobs = self.backend.logprobs(columns, parts, model=role)
            if role == "reference":
                run.reference = logprobs
            else:
                run.teacher = logprobs
        kl = self._config.auxiliary.kl
        if kl.coef > 0 and kl.place == "reward" and self._critic is None:
            run.apply_penalty(kl)

    def _current(self, run: StepRun, minibatch: Minibatch) -> tuple[np.ndarray, np.ndarray]:
        """The trained tokens of this rank's microbatches, and their current logprobs."""
        logprobs = self.backend.logprobs(run.columns, minibatch.parts)
        trained = run.columns.trained_of(np.concatenate([np.zeros(0, dtype=np.int64), *minibatch.parts]))
        return trained, logprobs[trained]

    def _forward_backward(self, run: StepRun, minibatch: Minibatch, *, is_first: bool) -> None:
        columns = run.columns
        objective = PolicyObjective(
            run,
            self._loss,
            denominator=self._config.denominator,
            divisor=math.inf if run.is_idle else self._divisor(minibatch),
            is_first=is_first,
            needs_advantage=self._may_skip,
            statistics=self._statistics(run, minibatch, is_first=is_first),
        )
        run.num_computed += self.backend.forward_backward(columns, minibatch.parts, objective)
        objective.finish()

    def _divisor(self, minibatch: Minibatch) -> float:
        return denominator(
            self._config,
            num_tokens=minibatch.num_tokens,
            num_samples=minibatch.num_samples,
            num_episodes=minibatch.num_episodes,
        )

    def _statistics(
        self, run: StepRun, minibatch: Minibatch, *, is_first: bool
    ) -> Mapping[str, Tensor] | None:
        """Statistics of the current logprobs over the whole minibatch, from a pass without gradients.

        None if the minibatch is a single microbatch, whose training pass computes them at no extra cost.
        """
        if self._loss.statistics is None:
            return {}
        if minibatch.num_parts == 1 and self._ranks.world == 1:
            return None
        with run.time_phase("statistics_s"), torch.no_grad():
            trained, logprobs = self._current(run, minibatch)
            inputs = run.inputs(trained, torch.from_numpy(logprobs), is_first=is_first)
            inputs, _ = with_bounded_ratios(inputs)
            statistics = self._loss.statistics(statistics_inputs(inputs, self._ranks))
        run.statistics.append(statistics)
        return statistics

    def _optim_step(self, run: StepRun, minibatch: Minibatch, update: int) -> None:
        optimizer = self._config.optimizer
        num_updates = self._config.steps * self._config.minibatches
        lr = learning_rate(optimizer, self._config.lr, update=update, num_updates=num_updates)
        norm = self.backend.optim_step(self._adam(lr))
        if not np.isfinite(norm):
            named = sample_names(run.columns, minibatch.samples)
            raise TrainingError(
                f"the gradient is {norm} in optimizer step {update}; its minibatch holds {named}"
            )
        run.grad_norms.append(norm)
        run.lr = lr
        if self._critic is not None:
            with run.time_phase("critic_s"):
                frac = lr / self._config.lr if self._config.lr else 1.0
                self._fit_critic(run, minibatch, self._critic, lr_frac=frac)

    def _fit_critic(
        self, run: StepRun, minibatch: Minibatch, critic: ValueModelConfig, *, lr_frac: float
    ) -> None:
        assert run.values is not None
        assert run.returns is not None
        parts = self.backend.cut(run.columns, minibatch.samples, model="critic")
        objective = ValueObjective(run.values, run.returns, critic.clip, minibatch.num_tokens)
        self.backend.forward_backward(run.columns, parts, objective, model="critic")
        loss = sum(self._ranks.gather_values(objective.finish()))
        norm = self.backend.optim_step(self._adam(critic.lr * lr_frac), model="critic")
        if not np.isfinite(norm):
            raise TrainingError(
                f"the critic's gradient is {norm} (loss {loss}); is train.auxiliary.critic.lr = "
                f"{critic.lr} too high?"
            )
        run.critic_losses.append(loss)
        run.critic_norms.append(norm)

    def _adam(self, lr: float) -> AdamStep:
        optimizer = self._config.optimizer
        return AdamStep(
            lr=lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        )


def _sums(counts: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The totals over all ranks, by minibatch and kind."""
    return [[sum(kind) for kind in zip(*ranks, strict=True)] for ranks in zip(*counts, strict=True)]


def _all_by_group(columns: Columns) -> np.ndarray:
    """All samples, ordered by group, so that the samples of a group can share their prefix."""
    return np.argsort(columns.group_ids, kind="stable")
