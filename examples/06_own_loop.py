"""A training loop written with the Tinker API. AstraFlow's services generate the data.

Try it: astraflow run examples/06_own_loop.yaml
"""

from astraflow.addons.tinker.client import TrainingClient
from astraflow.addons.tinker.wire_types import AdamParams, Datum, ModelInput, SamplingParams

__all__ = ["train"]


def train(
    client: TrainingClient,
    *,
    lr: float = 7e-4,
    warmup_steps: int = 10,
    num_parts: int = 2,
    sample_every: int = 10,
) -> None:
    """Runs once, in the trainer's process; `client.batches()` ends when the run does."""
    tokenizer = client.get_tokenizer()
    prompt = ModelInput.from_ints(tokenizer.encode("Calculate 378 + 937.<assistant>"))
    for batch in client.batches():
        adam = AdamParams(learning_rate=lr * min(1.0, batch.step / warmup_steps), grad_clip_norm=0.5)
        losses: list[float] = []
        for part in range(num_parts):
            data = batch.data[part::num_parts]
            num_sampled = sum(datum.loss_fn_inputs["mask"].to_numpy().sum() for datum in data)
            mean = [scaled(datum, 1 / num_sampled) for datum in data]
            passed = client.forward_backward(mean, "ppo", {"clip_high_threshold": 1.25})
            stepped = client.optim_step(adam)  # queued after it, so there is no wait in between
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
        if batch.step % sample_every:
            client.save_weights_for_sampler(
                f"step-{batch.step}"
            ).result()  # publishes the policy's next version
            continue
        sampler = (
            client.save_weights_and_get_sampling_client()
        )  # the same, and returns a client of an engine that serves it
        found = sampler.sample(prompt, num_samples=1, sampling_params=SamplingParams(max_tokens=20))
        answer = tokenizer.decode(found.result().sequences[0].tokens)
        reward = sum(batch.rewards) / len(batch.rewards)
        print(f"step {batch.step}: reward {reward:.3f}, losses {losses}, 378 + 937: {answer}", flush=True)
    client.save_state("final").result()


def scaled(datum: Datum, factor: float) -> Datum:
    """Scales advantages: the API sums the loss over tokens, so a factor of 1 / N makes it the mean."""
    advantages = datum.loss_fn_inputs["advantages"].to_numpy() * factor
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "advantages": advantages})
