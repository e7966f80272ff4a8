"""The chunked output head against the plain one: numbers, gradients, memory."""

from typing import Any

import pytest
import torch

from astraflow.protocols import EntropyUse
from astraflow.trainer.step import entropies, token_logprobs
from astraflow.trainer.torch.head import chunked_logprobs, num_chunk_tokens

VOCAB_SIZE = 9_000
NUM_TOKENS = 2 * num_chunk_tokens(VOCAB_SIZE) + 17
"""Three chunks, the last of which is short."""


def make_inputs(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, 8, generator=generator, dtype=dtype)
    weight = torch.randn(VOCAB_SIZE, 8, generator=generator, dtype=dtype)
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "target_ids": torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator),
    }


def plain(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (inputs["hidden"] @ inputs["weight"].t()).float()
    return token_logprobs(logits, inputs["target_ids"]), entropies(logits)


def gradients(inputs: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, (inputs["hidden"], inputs["weight"]))
    return torch.cat([gradient.flatten() for gradient in found])


# The plain head's own gradient of the entropies is 2e-6 from that in float64.
@pytest.mark.parametrize(("entropy", "tolerance"), [("none", 1e-6), ("value", 1e-6), ("gradient", 2e-6)])
def test_numbers_and_gradients_are_those_of_the_plain_head(entropy: EntropyUse, tolerance: float) -> None:
    inputs = make_inputs(torch.float32)
    slopes = torch.linspace(-1, 2, NUM_TOKENS)
    logprobs, found = chunked_logprobs(**inputs, entropy=entropy)
    expected, expected_entropies = plain(inputs)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)
    loss, expected_loss = (logprobs * slopes).sum(), (expected * slopes).sum()
    if found is not None:
        torch.testing.assert_close(found, expected_entropies, rtol=1e-5, atol=1e-5)
        assert found.requires_grad == (entropy == "gradient")
    if entropy == "gradient":
        assert found is not None
        loss, expected_loss = loss - found.sum(), expected_loss - expected_entropies.sum()
    right = gradients(inputs, expected_loss)
    assert float((gradients(inputs, loss) - right).norm() / right.norm()) < tolerance


def test_several_tokens_in_each_place_share_a_pass() -> None:
    inputs = make_inputs(torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS, 3), generator=generator)
    ids[:, 0] = ids[:, 1]  # also the same one twice
    inputs["target_ids"] = ids
    slopes = torch.linspace(-1, 2, NUM_TOKENS * 3).view(NUM_TOKENS, 3)
    logprobs, entropies_found = chunked_logprobs(**inputs, entropy="gradient")
    expected, expected_entropies = plain(inputs)
    assert logprobs.shape == (NUM_TOKENS, 3)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)
    assert entropies_found is not None
    right = gradients(inputs, (expected * slopes).sum() - expected_entropies.sum())
    found = gradients(inputs, (logprobs * slopes).sum() - entropies_found.sum())
    assert float((found - right).norm() / right.norm()) < 2e-6


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    inputs = make_inputs(torch.float32)
    inputs["weight"].requires_grad_(False)
    logprobs, _ = chunked_logprobs(**inputs)
    logprobs.sum().backward()
    assert inputs["weight"].grad is None
    assert inputs["hidden"].grad is not None


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass() -> None:
    inputs = make_inputs(torch.float32)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_logprobs(**inputs, entropy="gradient")
        assert max(kept) < NUM_TOKENS * VOCAB_SIZE / 100
        kept.clear()
        plain(inputs)
        assert max(kept) == NUM_TOKENS * VOCAB_SIZE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_wide_head_rounds_its_operands_but_not_its_logits(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (6 * torch.randn(NUM_TOKENS, 64, generator=generator)).bfloat16()
    weight = (0.1 * torch.randn(VOCAB_SIZE, 64, generator=generator)).requires_grad_()
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    served = hidden.double() @ weight.bfloat16().double().t() / temperature
    expected = torch.log_softmax(served, -1).gather(1, ids[:, None])[:, 0]
    errors: dict[bool, float] = {}
    for is_wide in (True, False):
        scaled = hidden if temperature == 1 else hidden / torch.full((NUM_TOKENS, 1), temperature)
        given = (scaled if is_wide else scaled.bfloat16()).requires_grad_()
        logprobs, _ = chunked_logprobs(given, weight, ids, is_wide=is_wide)
        errors[is_wide] = float((logprobs - expected).detach().abs().mean())
        gradient = torch.autograd.grad(logprobs.sum(), weight)[0]
        right = torch.autograd.grad(expected.sum(), weight, retain_graph=True)[0]
        assert float((gradient - right).norm() / right.norm()) < (1e-2 if is_wide else 3e-2)
    assert errors[True] < 1e-4
    assert errors[False] > 5e-3
