"""Two ranks under NCCL, one of which is killed, stopped, or out of memory: `make test-gpu` runs it."""

import pytest
import torch

from posing.on_gpus.conftest import models
from posing.on_gpus.test_lost_ranks import (
    test_a_rank_that_fails_within_a_step_ends_the_trainer_in_time_and_is_named,
)

__all__ = ["models", "test_a_rank_that_fails_within_a_step_ends_the_trainer_in_time_and_is_named"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
