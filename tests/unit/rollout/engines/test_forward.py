"""Which forward serves a model, and that it agrees with the model's own."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from astraflow.errors import DataError
from astraflow.rollout.engines.cache import KvCache
from astraflow.rollout.engines.forward import make_forward, score
from astraflow.rollout.engines.generic import GenericForward
from astraflow.rollout.engines.lean import LeanForward
from drivers.engine_models import configs, make_random_model

GENERIC = {"mistral_window", "gptneox"}


def own_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)


@pytest.mark.parametrize("kind", list(configs()))
def test_the_llama_family_runs_lean_and_others_generic(kind: str) -> None:
    forward = make_forward(make_random_model(kind), max_context=32)
    assert isinstance(forward, GenericForward if kind in GENERIC else LeanForward)


@pytest.mark.parametrize("kind", list(configs()))
@torch.inference_mode()
def test_decoding_and_scoring_agree_with_the_model(kind: str) -> None:
    reference = make_random_model(kind)
    forward = make_forward(make_random_model(kind), max_context=48)
    lengths = [40, 17, 2, 1]
    sequences = [torch.arange(n).mul(11 + n).remainder(40).tolist() for n in lengths]
    cache = KvCache(forward.cache_shape, num_slots=4, max_context=48)
    padded = torch.tensor([s[:-1] + [0] * (40 - len(s)) for s in sequences])
    forward.prefill(padded, torch.arange(4), cache)
    logits = forward.decode(torch.tensor([s[-1] for s in sequences]), np.array(lengths) - 1, cache)
    for row, sequence in enumerate(sequences):
        expected = own_logprobs(reference, sequence)
        assert torch.allclose(torch.log_softmax(logits[row], -1), expected[-1], atol=5e-5)
        targets = torch.tensor(sequence)[1:, None]
        scores = score(forward, torch.tensor(sequence)) if len(sequence) > 1 else torch.zeros(0)
        assert torch.allclose(scores, expected[:-1].gather(1, targets)[:, 0], atol=5e-5)


@pytest.mark.parametrize("kind", list(configs()))
@torch.inference_mode()
def test_what_follows_a_prefix_is_stored_as_if_all_were_prefilled(kind: str) -> None:
    forward = make_forward(make_random_model(kind), max_context=48)
    lengths = torch.tensor([47, 20, 9])
    tokens = torch.stack([torch.arange(48).mul(11 + n).remainder(40) for n in range(3)])
    whole, parts = (KvCache(forward.cache_shape, num_slots=5, max_context=48) for _ in range(2))
    rows, starts = torch.tensor([4, 0, 2]), torch.tensor([30, 1, 5])
    forward.prefill(tokens[:, :47], rows, whole)
    forward.prefill(tokens[:, :30], rows, parts)
    stretch = parts.stretch(rows, starts, 19, reach=47)  # pads past the end of the context
    forward.extend(tokens.gather(1, stretch.positions), stretch, parts)
    moved = [np.array([4, 0, 2]), np.array([0, 1, 2])]
    logits: list[torch.Tensor] = []
    for cache in (whole, parts):
        cache.move(*moved, 47)
        logits.append(forward.decode(tokens[range(3), lengths], lengths.numpy(), cache))
    assert torch.allclose(logits[0], logits[1], atol=5e-5)


@torch.inference_mode()
def test_parameters_replaced_in_place_are_used_after_refresh() -> None:
    model = make_random_model(seed=0)
    forward = make_forward(model, max_context=32)
    model.load_state_dict(make_random_model(seed=1).state_dict())
    forward.refresh()
    tokens = [5, 9, 3, 30, 12]
    expected = own_logprobs(make_random_model(seed=1), tokens)
    targets = torch.tensor(tokens)[1:, None]
    scores = score(forward, torch.tensor(tokens))
    assert torch.allclose(scores, expected[:-1].gather(1, targets)[:, 0], atol=5e-5)


class TwiceTheAttention(torch.nn.Module):
    """Stands for attention that does not go through the interface."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, weights = self.inner(*args, **kwargs)
        return hidden + hidden.cumsum(1), weights


def test_a_model_whose_attention_cannot_be_decoded_is_refused() -> None:
    model = make_random_model("gptneox")
    for layer in model.gpt_neox.layers:
        layer.attention = TwiceTheAttention(layer.attention)
    with pytest.raises(DataError, match="attention is not one that the torch engine"):
        make_forward(model, max_context=32)


def test_bfloat16_models_are_served() -> None:
    model = make_random_model().to(torch.bfloat16)
    assert isinstance(make_forward(model, max_context=32), LeanForward)


@torch.inference_mode()
def test_a_deep_model_in_bfloat16_runs_lean_and_closer_to_float32_than_its_modules() -> None:
    tokens = torch.arange(30).mul(7).remainder(40)
    config = configs()["llama"]
    config.num_hidden_layers = 24
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    own = own_logprobs(model, tokens.tolist())
    precise = own_logprobs(deepcopy(model).float(), tokens.tolist())
    forward = make_forward(model, max_context=32)
    assert isinstance(forward, LeanForward)
    targets = tokens[1:, None]
    expected = precise[:-1].gather(1, targets)[:, 0]
    rounded = own[:-1].gather(1, targets)[:, 0]
    assert (score(forward, tokens) - expected).abs().mean() < (rounded - expected).abs().mean()
