"""A teacher behind an endpoint: the logprobs of its model, retries, and what is refused."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from starlette.responses import Response

from astraflow.addons.distillation.endpoint import EndpointTeacher
from astraflow.addons.inference_servers.model_choice import ModelChoice
from astraflow.errors import ConfigError, RolloutError
from drivers.completions_server import CompletionsServer, served
from drivers.engine_models import make_engine_on, make_model_folder, make_random_model, snapshot_of

TOKENS = (5, 9, 3, 30, 12, 7)


@pytest.fixture
def server() -> CompletionsServer:
    return CompletionsServer(make_random_model(), encode=lambda text: [2 + ord(c) % 30 for c in text])


@pytest.fixture
async def teacher(server: CompletionsServer) -> AsyncIterator[EndpointTeacher]:
    async with served(server) as url:
        teacher = EndpointTeacher(ModelChoice(url=url))
        yield teacher
        await teacher.close()


async def test_an_endpoint_scores_like_the_same_model_in_the_run(
    teacher: EndpointTeacher, tmp_path: Path
) -> None:
    await teacher.check_scores(4)
    engine = make_engine_on(snapshot_of(make_random_model(), make_model_folder(tmp_path)))
    here, there = await engine.score_top(TOKENS, 4), await teacher.score_top(TOKENS, 4)
    assert there.top_ids.tolist() == here.top_ids.tolist()
    assert np.abs(there.top_logprobs - here.top_logprobs).max() < 1e-4
    assert np.abs(await teacher.score(TOKENS) - await engine.score(TOKENS)).max() < 1e-4
    await engine.close()


async def test_a_teacher_that_is_slow_or_limits_its_rate_is_asked_again(
    teacher: EndpointTeacher, server: CompletionsServer
) -> None:
    server.problems = [Response("slow down", status_code=429), Response("busy", status_code=503)]
    assert len(await teacher.score(TOKENS)) == len(TOKENS) - 1
    assert len(server.asked) == 3


async def test_a_teacher_without_logprobs_is_refused() -> None:
    async with served(CompletionsServer(make_random_model(), gives_logprobs=False)) as url:
        teacher = EndpointTeacher(ModelChoice(url=url))
        with pytest.raises(ConfigError, match=r"can't score tokens: .* gives no prompt_logprobs"):
            await teacher.check_scores(0)
        await teacher.close()


async def test_a_teacher_with_another_vocabulary_is_refused(teacher: EndpointTeacher) -> None:
    text = "2 + 3"
    ids = [2 + ord(c) % 30 for c in text]
    await teacher.check_tokens(text, ids)
    with pytest.raises(ConfigError, match=r"has another tokenizer than the policy: it reads '2 \+ 3' as"):
        await teacher.check_tokens(text, ids[::-1])
    with pytest.raises(RolloutError, match=r"400: .*out of vocabulary") as err:
        await teacher.score((1, 1000))
    assert not err.value.is_retryable


async def test_endpoints_score_at_temperature_1_only(teacher: EndpointTeacher) -> None:
    with pytest.raises(RolloutError, match=r"at temperature 1 only, not at 0\.5"):
        await teacher.score_top(TOKENS, 2, temperature=0.5)
