"""A training client with the verbs of the Tinker API, on top of a trainer backend in this process.

    caller's threads                       verbs' thread (owns the backend)
    forward_backward, optim_step, ... -->  one after the other, in the order of the calls; futures come back

A loop that was written for that API can make the same calls here. Two features are added for a loop that
takes part in a run. `batches` yields the data that rollout services sampled. The first
`save_weights_for_sampler` (or `save_weights_and_get_sampling_client`) after a batch ends the batch's step:
its weights become the next version, which rollout services load. Without a run, the verbs work on data that
the caller provides.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.addons.tinker.losses import TINKER_LOSSES, SummedLoss, cross_entropy
from astraflow.addons.tinker.sampling import ApiFuture, EngineSampler, SamplingClient
from astraflow.addons.tinker.wire_types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    RunBatch,
    SaveWeightsResponse,
    TensorData,
    columns_from_data,
    run_batch,
)
from astraflow.config import check_args
from astraflow.errors import ConfigError, TrainingError
from astraflow.protocols import AdamStep, Engine, TrainerBackend
from astraflow.types import Batch
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.types.token_columns import Columns
from astraflow.weights.snapshot import with_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RunSteps", "TrainingClient"]

_ResultT = TypeVar("_ResultT")
CustomLoss = Callable[[Sequence[Datum], list[Any]], tuple[Any, dict[str, float]]]
"""Takes the data and, for each datum, the logprobs [N] of its targets as a tensor. Returns a scalar loss and
metrics."""


class RunSteps(Protocol):
    """The run that a client takes part in; `OwnLoopLearner` implements it."""

    def take(self) -> Batch | None:
        """Waits for the next step's batch and returns it; None after the last step."""
        ...

    def finish(self, tensors: Sequence[HostTensor], metrics: Mapping[str, float]) -> None:
        """Ends the step of the batch that was taken last, with these weights."""
        ...


class TrainingClient:
    """The verbs over one backend. All other users of the backend go through `call`.

    Verbs return futures. A wrong argument raises at once. Any other error is raised by the future's `result`.
    The owner calls `close` last.

    Example::

        client = TrainingClient(TorchBackend(TrainConfig(), model_dir=folder), model_dir=folder)
        client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-4)).result()
    """

    def __init__(
        self,
        backend: TrainerBackend,
        *,
        model_dir: str | Path,
        policy: str = "model",
        states: Path | None = None,
        make_engine: Callable[[WeightSnapshot], Engine] | None = None,
        run: RunSteps | None = None,
    ) -> None:
        """`states`: the folder for `save_state`; optional if no state is saved. `make_engine`: makes the
        engine for sampling clients; optional if nothing is sampled. `run`: the run that the client takes part
        in; None for none.
        """
        self._backend = backend
        self._model_dir = Path(model_dir)
        self._policy = policy
        self._states = states
        self._run = run
        self._sampler = EngineSampler(make_engine) if make_engine else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verbs")
        self._saved: WeightSnapshot | None = None
        self._num_saved = 0
        self._is_in_step = False
        """True from the start of a batch until its step ends."""
        self._is_step_over = False
        """True from a step's end until the next batch. Without a run, both flags stay False."""
        self._failure: BaseException | None = None
        """The exception that the last failed verb raised."""
        self._metrics: dict[str, float] = {}
        """Metrics of the verbs since the last batch. The run gets them when the step ends."""

    def close(self) -> None:
        """Waits for all verbs that were called, then ends the threads."""
        self._thread.shutdown()
        if self._sampler is not None:
            self._sampler.close()

    def call(self, function: Callable[[], _ResultT]) -> ApiFuture[_ResultT]:
        """Runs a function in the verbs' thread, after all earlier calls."""
        future = self._thread.submit(function)
        future.add_done_callback(self._note_failure)
        return ApiFuture(future)

    # --- the run ---

    def batches(self) -> Iterator[RunBatch]:
        """Yields the run's batches, one per step, until the run ends.

        Raises: ConfigError without a run, or if the previous step was not ended by saving its weights.
        """
        if self._run is None:
            raise ConfigError(
                "this client takes part in no run, so there are no batches; bring your own data"
            )
        while (batch := self._run.take()) is not None:
            self._is_in_step = True
            self._is_step_over = False
            self._metrics = {}
            yield run_batch(batch)
            self.call(lambda: None).result()  # returns when all calls of this step are done
            if self._is_in_step:
                raise ConfigError(
                    f"step {batch.step + 1} was not ended: call save_weights_for_sampler before the next "
                    "batch"
                ) from self._failure

    # --- training ---

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Computes the loss, summed over all targets, and the targets' logprobs. It changes nothing.

        Raises: ConfigError for an unknown loss or argument; DataError, from the future, for bad data.
        """
        return self._compute(data, loss_fn, loss_fn_config, is_dry=True)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Does the same as `forward`, and adds the gradient to the gradients since the last `optim_step`."""
        return self._compute(data, loss_fn, loss_fn_config, is_dry=False)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Does the same as `forward_backward` for any loss of the logprobs, with a second forward pass.

        The first pass computes the logprobs, from which `loss_fn(data, logprobs)` computes the loss and its
        gradient with respect to each logprob. The second pass propagates these gradients to the weights.
        """

        def run() -> ForwardBackwardOutput:
            columns, spans = self._columns(data, weights="", logprobs="")
            parts = self._backend.cut(columns, np.arange(len(columns.lengths)))
            logprobs = self._backend.logprobs(columns, parts)
            leaves = [torch.from_numpy(logprobs[span]).requires_grad_() for span in spans]
            loss, metrics = loss_fn(data, leaves)
            loss.backward()
            slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            # cross_entropy is -sum(weight * logprob), so with these weights its gradient is that of the loss.
            columns.advantages[:] = -torch.cat(slopes).numpy()
            objective = SummedLoss(columns, cross_entropy)
            self._backend.forward_backward(columns, parts, objective)
            objective.finish()
            self._metrics["loss"] = float(loss.detach())
            return _output(float(loss.detach()), logprobs, spans, metrics)

        return self.call(run)

    def optim_step(self, adam_params: AdamParams) -> ApiFuture[OptimStepResponse]:
        """Makes one step of AdamW with the gradients since the last optimizer step.

        In a run, this is allowed only until the step's weights are saved, so that a checkpoint holds the same
        weights that are published.

        Raises: from the future, ConfigError if the step is over; TrainingError if the gradient's norm isn't
        finite.
        """

        def run() -> OptimStepResponse:
            self._check_step()
            norm = self._backend.optim_step(
                AdamStep(
                    lr=adam_params.learning_rate,
                    betas=(adam_params.beta1, adam_params.beta2),
                    eps=adam_params.eps,
                    weight_decay=adam_params.weight_decay,
                    max_grad_norm=adam_params.grad_clip_norm or float("inf"),
                )
            )
            if not np.isfinite(norm):
                raise TrainingError(f"the gradient's norm is {norm}; are the inputs of the loss right?")
            self._metrics |= {"grad_norm": norm, "lr": adam_params.learning_rate}
            return OptimStepResponse({"grad_norm": norm})

        return self.call(run)

    # --- states ---

    def save_state(self, name: str, ttl_seconds: int | None = None) -> ApiFuture[SaveWeightsResponse]:
        """Writes weights and optimizer into a folder of this name, and replaces an older one."""
        del ttl_seconds  # nothing expires
        folder = self._state_folder(name)

        def run() -> SaveWeightsResponse:
            aside = folder.with_name(f".{name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            self._backend.save(aside, num_steps_done=0)()  # the run counts its steps; a state doesn't
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            return SaveWeightsResponse(str(folder))

        return self.call(run)

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Loads the weights of a saved state and resets the optimizer.

        Raises: DataError, from the future, if the state doesn't fit the model.
        """
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Loads the weights and the optimizer of a saved state.

        Raises: DataError, from the future, if the state doesn't fit the model.
        """
        return self._load(path, with_optimizer=True)

    # --- weights to sample with ---

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> ApiFuture[SaveWeightsResponse]:
        """Keeps a copy of the weights for `create_sampling_client`.

        In a run, the first call after a batch ends the batch's step. The future is done once the weights are
        handed over for publication.
        """
        del ttl_seconds  # nothing expires

        def run() -> SaveWeightsResponse:
            tensors = tuple(self._backend.export())
            self._num_saved += 1
            whole = with_base(tensors, self._model_dir)
            self._saved = WeightSnapshot(self._policy, self._num_saved, whole, self._model_dir)
            if self._is_in_step and self._run is not None:
                self._is_in_step = False
                self._is_step_over = True
                self._run.finish(tensors, self._metrics)
            return SaveWeightsResponse(f"{self._policy}/{self._num_saved}/{name}")

        return self.call(run)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Returns a client that samples with the weights that were saved last.

        Raises: ConfigError if the path belongs to other weights, or if there is no engine to sample with.
        """
        sampler = self._sampler
        if sampler is None:
            raise ConfigError("this client has no engine to sample with; give TrainingClient a make_engine")

        def run() -> SamplingClient:
            saved = self._saved
            if saved is None or not model_path.startswith(f"{self._policy}/{saved.version}/"):
                raise ConfigError(f"{model_path!r} are not the weights that were saved last; save them again")
            sampler.load(saved)
            return SamplingClient(sampler, saved.version)

        return self.call(run).result()

    def save_weights_and_get_sampling_client(self, name: str = "latest") -> SamplingClient:
        """Saves the weights, and returns a client that samples with them."""
        return self.create_sampling_client(self.save_weights_for_sampler(name).result().path)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer in the model's folder."""
        from transformers import AutoTokenizer

        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(self._model_dir))

    # --- for event loops: the first await returns the future, the second one its result ---

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Does the same as `forward_backward`."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    async def optim_step_async(self, adam_params: AdamParams) -> ApiFuture[OptimStepResponse]:
        """Does the same as `optim_step`."""
        return self.optim_step(adam_params)

    async def save_state_async(self, name: str) -> ApiFuture[SaveWeightsResponse]:
        """Does the same as `save_state`."""
        return self.save_state(name)

    async def save_weights_for_sampler_async(self, name: str) -> ApiFuture[SaveWeightsResponse]:
        """Does the same as `save_weights_for_sampler`."""
        return self.save_weights_for_sampler(name)

    # --- small parts ---

    def _columns(self, data: Sequence[Datum], *, weights: str, logprobs: str) -> tuple[Columns, list[slice]]:
        return columns_from_data(
            data, weights=weights, logprobs=logprobs, vocab_size=self._backend.vocab_size
        )

    def _compute(
        self, data: Sequence[Datum], name: str, config: Mapping[str, float] | None, *, is_dry: bool
    ) -> ApiFuture[ForwardBackwardOutput]:
        loss = TINKER_LOSSES.get(name)
        if loss is None:
            raise ConfigError(
                f"loss_fn = {name!r} is unknown (choices: {', '.join(TINKER_LOSSES)}; any other: "
                "forward_backward_custom)"
            )
        args = dict(config or {})
        check_args(loss.function, args, where="loss_fn_config")

        def run() -> ForwardBackwardOutput:
            columns, spans = self._columns(data, weights=loss.weights, logprobs=loss.logprobs)
            parts = self._backend.cut(columns, np.arange(len(columns.lengths)))
            objective = SummedLoss(columns, lambda inputs: loss.function(inputs, **args))
            if is_dry:
                scores = torch.from_numpy(self._backend.logprobs(columns, parts))
                objective(np.arange(len(scores)), scores, None)
            else:
                self._backend.forward_backward(columns, parts, objective)
            total, logprobs = objective.finish()
            if not is_dry:
                self._note(total, columns.behavior_logprobs, logprobs)
            return _output(total, logprobs, spans, {})

        return self.call(run)

    def _note(self, loss: float, sampled: NDArray[np.float32], logprobs: NDArray[np.float32]) -> None:
        """Records the loss and, once per step, the gap between the current weights and those that sampled.

        `sampled`: logprobs under the weights that sampled the tokens; 0 for tokens that no policy sampled.
        Only the first data of a step are measured, because updates widen the gap.
        """
        self._metrics["loss"] = loss
        if "behavior_gap" in self._metrics or not sampled.any():
            return
        gap = np.abs(logprobs - sampled)[sampled != 0]
        self._metrics |= {"behavior_gap": float(gap.mean()), "behavior_gap_max": float(gap.max())}

    def _load(self, path: str, *, with_optimizer: bool) -> ApiFuture[LoadWeightsResponse]:
        def run() -> LoadWeightsResponse:
            self._check_step()
            self._backend.load(Path(path))
            if not with_optimizer:
                self._backend.reset_optimizer()
            return LoadWeightsResponse(path)

        return self.call(run)

    def _check_step(self) -> None:
        """Raises: ConfigError if the step's weights are already saved, because they must not change then."""
        if self._is_step_over:
            raise ConfigError("the step ended when its weights were saved; take the next batch first")

    def _note_failure(self, future: "Future[Any]") -> None:
        # Kept because a loop that never asks a future for its result would not learn of the failure.
        self._failure = future.exception() or self._failure

    def _state_folder(self, name: str) -> Path:
        if self._states is None:
            raise ConfigError("this client has no folder to save in; give TrainingClient one as `states`")
        if not name or name != Path(name).name or name.startswith("."):
            raise ConfigError(f"{name!r} can't name a state, because it becomes a folder's name")
        return self._states / name


def _output(
    loss: float, logprobs: NDArray[np.float32], spans: Sequence[slice], metrics: Mapping[str, float]
) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData.from_numpy(logprobs[span])} for span in spans]
    return ForwardBackwardOutput(outputs, {"loss:sum": loss, **metrics})
