"""A model that is computed batch-invariantly: right, and the same bits whatever else is computed."""

from typing import Any

import pytest
import torch

from astraflow.addons.exact.model import SPAN, InvariantModel
from astraflow.errors import DataError
from drivers.engine_models import make_random_model

KINDS = ("qwen3", "qwen2", "llama", "llama3_rope", "mistral")
LENGTHS = (2 * SPAN + 5, 3, SPAN, SPAN + 1, 1, 17)
"""On both sides of where a query's keys get another length, and of a tile."""


def tokens_of(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.arange(length).mul(11 + length).remainder(40) for length in lengths]


def logprobs_of(model: InvariantModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    hidden = model.sequences(torch.cat(sequences), lengths)
    return list(torch.log_softmax(model.logits(hidden), -1).split(lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_model_computes(kind: str) -> None:
    model = make_random_model(kind)
    sequences = tokens_of(LENGTHS)
    for sequence, found in zip(sequences, logprobs_of(InvariantModel(model), sequences), strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(model(sequence[None]).logits[0], -1)
        assert torch.allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_gets_the_same_bits_alone_and_beside_others(kind: str) -> None:
    model = InvariantModel(make_random_model(kind))
    sequences = tokens_of(LENGTHS)
    together = logprobs_of(model, sequences)
    turned = logprobs_of(model, sequences[::-1])[::-1]
    for sequence, first, second in zip(sequences, together, turned, strict=True):
        (alone,) = logprobs_of(model, [sequence])
        assert torch.equal(alone, first)
        assert torch.equal(alone, second)


def test_the_beginning_of_a_sequence_does_not_depend_on_its_length() -> None:
    model = InvariantModel(make_random_model())
    (whole,) = logprobs_of(model, tokens_of((150,)))
    sequence = tokens_of((150,))[0]
    for length in (1, 63, 64, 65, 149):
        (part,) = logprobs_of(model, [sequence[:length]])
        assert torch.equal(part, whole[:length])


def test_logprobs_are_at_the_temperature_of_each_token() -> None:
    model = InvariantModel(make_random_model())
    (sequence,) = tokens_of((9,))
    hidden = model.sequences(sequence, [9])
    inverse = torch.linspace(0.5, 2, 9)
    expected = torch.log_softmax(model.logits(hidden) * inverse[:, None], -1)
    targets = torch.arange(9)
    assert torch.equal(model.logprobs(hidden, targets, inverse), expected[targets, targets])


def test_weights_that_are_replaced_in_place_are_used() -> None:
    module = make_random_model(seed=0)
    model = InvariantModel(module)
    module.load_state_dict(make_random_model(seed=1).state_dict())
    (found,) = logprobs_of(model, tokens_of((20,)))
    (expected,) = logprobs_of(InvariantModel(make_random_model(seed=1)), tokens_of((20,)))
    assert torch.equal(found, expected)


class Uneven(InvariantModel):
    """Stands for a machine whose kernels treat the rows of a tile differently."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) + 1e-6 * torch.arange(len(hidden))[:, None].cos()


def test_a_machine_on_which_the_place_of_a_row_matters_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"not guaranteed for 'qwen3' on this machine: a sequence of \d+ tokens"
    ):
        Uneven(make_random_model())


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("gptneox", "'gpt_neox': only llama, mistral, qwen2, qwen3"),
        ("mistral_window", "a window of 8 positions"),
    ],
)
def test_a_family_that_it_would_compute_wrongly_is_refused(kind: str, problem: str) -> None:
    model: Any = make_random_model(kind)
    with pytest.raises(DataError, match=problem):
        InvariantModel(model)
