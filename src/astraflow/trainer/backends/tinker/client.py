"""A training client with the verbs of the Tinker API, over the torch backend of this process.

    caller's threads                       verbs' thread (owns the backend)
    forward_backward, optim_step, ... -->  one after the other, in the order of the calls; futures come back

A loop that was written for that API finds its calls here. What it does not find there are the two ends of a
run: `batches` gives the data that rollout services sampled, and the first `save_weights_for_sampler` (or
`save_weights_and_get_sampling_client`) after a batch ends its step: those weights are the next version, which
rollout services pick up. Without a run the verbs work alone, on data that the caller brings.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.config import check_args
from astraflow.errors import ConfigError
from astraflow.host_tensors import HostTensor, WeightSnapshot
from astraflow.losses.tinker import LOSSES_BY_INPUTS, cross_entropy
from astraflow.protocols import Engine
from astraflow.trainer.backends.tinker.sampling import ApiFuture, Sampler, SamplingClient
from astraflow.trainer.backends.tinker.types import (
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
from astraflow.trainer.backends.torch_backend import TorchBackend
from astraflow.trainer.columns import Columns
from astraflow.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RunSteps", "TrainingClient"]

_ResultT = TypeVar("_ResultT")
CustomLoss = Callable[[Sequence[Datum], list[Any]], tuple[Any, dict[str, float]]]


class RunSteps(Protocol):
    """The run that a client takes part in."""

    def take(self) -> Batch | None:
        """Waits for the next step's batch; None after the last."""
        ...

    def finish(self, tensors: Sequence[HostTensor], metrics: Mapping[str, float]) -> None:
        """Ends the step of the batch that was taken."""
        ...


class TrainingClient:
    """The verbs over one backend. Everyone else uses the backend only through `call`.

    Example::

        client = TrainingClient(TorchBackend(TrainConfig(), model_dir=folder), model_dir=folder)
        client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-4)).result()
    """

    def __init__(
        self,
        backend: TorchBackend,
        *,
        model_dir: str | Path,
        policy: str = "model",
        states: Path | None = None,
        make_engine: Callable[[WeightSnapshot], Engine] | None = None,
        run: RunSteps | None = None,
    ) -> None:
        """`states`: the folder of `save_state`. `make_engine`: makes the engine of a sampling client."""
        self._backend = backend
        self._model_dir = Path(model_dir)
        self._policy = policy
        self._states = states
        self._run = run
        self._sampler = Sampler(make_engine) if make_engine else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verbs")
        self._saved: WeightSnapshot | None = None
        self._num_saved = 0
        self._is_in_step = self._is_step_over = False
        self._failure: BaseException | None = None
        """What the verb that failed last raised."""
        self._metrics: dict[str, float] = {}
        """Metrics of the verbs since the batch was taken."""

    def close(self) -> None:
        """Ends the threads; verbs that were called are done first."""
        self._thread.shutdown()
        if self._sampler is not None:
            self._sampler.close()

    def call(self, function: Callable[[], _ResultT]) -> ApiFuture[_ResultT]:
        """Runs a function in the verbs' thread, after what was called before."""
        future = self._thread.submit(function)
        future.add_done_callback(self._note_failure)
        return ApiFuture(future)

    # --- the run ---

    def batches(self) -> Iterator[RunBatch]:
        """The batches of the run, step by step, until its end.

        Raises: ConfigError outside of a run, or if the step before was not ended by saving its weights.
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
            self.call(lambda: None).result()  # what was called in this step is done
            if self._is_in_step:
                raise ConfigError(
                    f"step {batch.step} was not ended: call save_weights_for_sampler before the next batch"
                ) from self._failure

    # --- training ---

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """The loss, summed over all targets, and their logprobs; changes nothing.

        Raises: ConfigError for an unknown loss or argument; DataError by the future for bad data.
        """
        return self._compute(data, loss_fn, loss_fn_config, is_dry=True)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """As `forward`, and adds the gradient of the sum to those since the last `optim_step`."""
        return self._compute(data, loss_fn, loss_fn_config, is_dry=False)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss
    ) -> ApiFuture[ForwardBackwardOutput]:
        """`forward_backward` of any loss of logprobs: `loss_fn(data, logprobs)` gets a tensor [N] a datum,
        and returns a scalar and metrics. Costs a second forward pass."""

        def run() -> ForwardBackwardOutput:
            import torch

            columns, spans = self._columns(data, weights="", logprobs="")
            _, logprobs = self._backend.add_gradient(columns, cross_entropy, is_dry=True)
            leaves = [torch.from_numpy(logprobs[span]).requires_grad_() for span in spans]
            loss, metrics = loss_fn(data, leaves)
            loss.backward()
            slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            columns.advantages[:] = -torch.cat(slopes).numpy()
            self._backend.add_gradient(columns, cross_entropy)
            self._metrics["loss"] = float(loss.detach())
            return _output(float(loss.detach()), logprobs, spans, metrics)

        return self.call(run)

    def optim_step(self, adam_params: AdamParams) -> ApiFuture[OptimStepResponse]:
        """One step of AdamW with the gradients since the last one.

        In a run only until the step's weights are saved: checkpoints hold what is published.
        """

        def run() -> OptimStepResponse:
            self._check_step()
            norm = self._backend.apply_gradient(
                lr=adam_params.learning_rate,
                betas=(adam_params.beta1, adam_params.beta2),
                eps=adam_params.eps,
                weight_decay=adam_params.weight_decay,
                max_grad_norm=adam_params.grad_clip_norm or float("inf"),
            )
            self._metrics |= {"grad_norm": norm, "lr": adam_params.learning_rate}
            return OptimStepResponse({"grad_norm": norm})

        return self.call(run)

    # --- states ---

    def save_state(self, name: str, ttl_seconds: int | None = None) -> ApiFuture[SaveWeightsResponse]:
        """Writes weights and optimizer into a folder of this name, over one that is there."""
        del ttl_seconds  # nothing expires
        folder = self._state_folder(name)

        def run() -> SaveWeightsResponse:
            aside = folder.with_name(f".{name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            self._backend.save(aside)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            return SaveWeightsResponse(str(folder))

        return self.call(run)

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Loads the weights of a saved state and resets the optimizer. The future raises DataError."""
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """All of a saved state. Raises, by the future: DataError."""
        return self._load(path, with_optimizer=True)

    # --- weights to sample with ---

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> ApiFuture[SaveWeightsResponse]:
        """Saves the weights for `create_sampling_client`. In a run, the first call after a batch ends its
        step; the result comes once the weights are on their way to the publisher."""
        del ttl_seconds

        def run() -> SaveWeightsResponse:
            tensors = tuple(self._backend.export())
            self._num_saved += 1
            self._saved = WeightSnapshot(self._policy, self._num_saved, tensors, self._model_dir)
            if self._is_in_step and self._run is not None:
                self._is_in_step = False
                self._is_step_over = True
                self._run.finish(tensors, self._metrics)
            return SaveWeightsResponse(f"{self._policy}/{self._num_saved}/{name}")

        return self.call(run)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """A client that samples with the weights that were saved last.

        Raises: ConfigError if the path is that of others.
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
        """Both."""
        return self.create_sampling_client(self.save_weights_for_sampler(name).result().path)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer of the model's folder."""
        from transformers import AutoTokenizer

        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(self._model_dir))

    # --- the same in an event loop: the first await gives the future ---

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """As `forward_backward`."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    async def optim_step_async(self, adam_params: AdamParams) -> ApiFuture[OptimStepResponse]:
        """As `optim_step`."""
        return self.optim_step(adam_params)

    async def save_state_async(self, name: str) -> ApiFuture[SaveWeightsResponse]:
        """As `save_state`."""
        return self.save_state(name)

    async def save_weights_for_sampler_async(self, name: str) -> ApiFuture[SaveWeightsResponse]:
        """As `save_weights_for_sampler`."""
        return self.save_weights_for_sampler(name)

    # --- small parts ---

    def _columns(self, data: Sequence[Datum], *, weights: str, logprobs: str) -> tuple[Columns, list[slice]]:
        return columns_from_data(
            data, weights=weights, logprobs=logprobs, vocab_size=self._backend.vocab_size
        )

    def _compute(
        self, data: Sequence[Datum], name: str, config: Mapping[str, float] | None, *, is_dry: bool
    ) -> ApiFuture[ForwardBackwardOutput]:
        loss = LOSSES_BY_INPUTS.get(name)
        if loss is None:
            raise ConfigError(
                f"loss_fn = {name!r} is unknown (choices: {', '.join(LOSSES_BY_INPUTS)}; any other: "
                "forward_backward_custom)"
            )
        args = dict(config or {})
        check_args(loss.function, args, where="loss_fn_config")

        def run() -> ForwardBackwardOutput:
            columns, spans = self._columns(data, weights=loss.weights, logprobs=loss.logprobs)
            total, logprobs = self._backend.add_gradient(
                columns, lambda inputs: loss.function(inputs, **args), is_dry=is_dry
            )
            if not is_dry:
                self._note(total, columns.behavior_logprobs, logprobs)
            return _output(total, logprobs, spans, {})

        return self.call(run)

    def _note(self, loss: float, sampled: NDArray[np.float32], logprobs: NDArray[np.float32]) -> None:
        """The loss; and once per step, the gap between the weights and those that sampled. Tokens that were
        not sampled have 0."""
        self._metrics["loss"] = loss
        if "behavior_gap" in self._metrics or not sampled.any():
            return
        gap = np.abs(logprobs - sampled)[sampled != 0]
        self._metrics |= {"behavior_gap": float(gap.mean()), "behavior_gap_max": float(gap.max())}

    def _load(self, path: str, *, with_optimizer: bool) -> ApiFuture[LoadWeightsResponse]:
        def run() -> LoadWeightsResponse:
            self._check_step()
            num_steps_done = self._backend.num_steps_done
            self._backend.load(Path(path))
            self._backend.num_steps_done = num_steps_done  # the run's, not the state's
            if not with_optimizer:
                self._backend.forget_optimizer()
            return LoadWeightsResponse(path)

        return self.call(run)

    def _check_step(self) -> None:
        if self._is_step_over:
            raise ConfigError("the step ended when its weights were saved; take the next batch first")

    def _note_failure(self, future: "Future[Any]") -> None:
        self._failure = future.exception() or self._failure

    def _state_folder(self, name: str) -> Path:
        if self._states is None:
            raise ConfigError("this client has no folder to save in; give TrainingClient one as `states`")
        if not name or name != Path(name).name or name.startswith("."):
            raise ConfigError(f"{name!r} is no name for a state: it becomes a folder's name")
        return self._states / name


def _output(
    loss: float, logprobs: NDArray[np.float32], spans: Sequence[slice], metrics: Mapping[str, float]
) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData.from_numpy(logprobs[span])} for span in spans]
    return ForwardBackwardOutput(outputs, {"loss:sum": loss, **metrics})
