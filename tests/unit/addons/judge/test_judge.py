"""Judges: what they are asked, what their words are worth, and how they join other rewards."""

from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.config import parse_config
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.scoring import ScoringPool
from astraflow.service.server import HttpServer
from astraflow.tasks.config import TasksConfig
from astraflow.types import GenerateRequest, Generation, Task
from drivers.rollout_fakes import ScriptedEngine, make_hosted

TASK = Task(id="q", source="s", prompt="2+3", answer="5")
JUDGE = {"name": "judge", "policy": "judge", "prompt": "{prompt} {answer} {text}?"}


def tasks(reward: dict[str, Any], **fields: Any) -> TasksConfig:
    sources = {"s": {"name": "jsonl", "path": "unused.jsonl"}}
    return parse_config({"sources": sources, "reward": reward, **fields}, TasksConfig)


def scoring(engine: ScriptedEngine, reward: dict[str, Any], **fields: Any) -> ScoringPool:
    made = ScoringPool(tasks(reward, **fields))
    made.policies = {"judge": make_hosted("judge", engine)}
    return made


@pytest.mark.parametrize(
    ("reply", "value", "unclear"),
    [
        ("yes", 1.0, 0.0),
        ("No.", 0.0, 0.0),
        ("no, well: yes", 1.0, 0.0),
        ("Yes, there is no error in it.", 1.0, 0.0),
        ("maybe", -1.0, 1.0),
        ("<think>yes</think>hm", -1.0, 1.0),
        ("<think>yes", -1.0, 1.0),
    ],
)
async def test_the_verdict_in_the_reply_is_the_value(reply: str, value: float, unclear: float) -> None:
    engine = ScriptedEngine(reply)
    scores = scoring(engine, {**JUDGE, "unclear": -1.0})
    await scores.start()
    score = await scores.score(TASK, "5")
    await scores.close()
    assert (score, score.parts) == (value, {"judge_unclear": unclear, "reward/judge": value})
    asked = engine.requests[0]
    assert "".join(map(chr, asked.token_ids)).count("2+3 5 5?") == 1
    assert asked.sampling.temperature == 0.0


async def test_a_judge_without_a_clear_verdict_is_asked_once_more_for_the_verdict_alone() -> None:
    engine = ScriptedEngine(
        lambda request: "No." if "only your verdict" in text_of(request) else "Hm, yes/no."
    )
    scores = scoring(engine, {**JUDGE, "unclear": -1.0})
    score = await scores.score(TASK, "5")
    await scores.close()
    assert (score, score.parts) == (0.0, {"judge_unclear": 0.0, "reward/judge": 0.0})
    assert len(engine.requests) == 2
    asked = text_of(engine.requests[1])
    assert asked.index("2+3 5 5?") < asked.index("Hm, yes/no.") < asked.index("only your verdict: yes or no.")


async def test_a_judge_without_room_for_a_second_question_is_unclear() -> None:
    engine = ScriptedEngine("hm", max_context=40)
    scores = scoring(engine, {**JUDGE, "unclear": -1.0})
    score = await scores.score(TASK, "5")
    await scores.close()
    assert (score, score.parts["judge_unclear"], len(engine.requests)) == (-1.0, 1.0, 1)


def text_of(request: GenerateRequest) -> str:
    return "".join(map(chr, request.token_ids))


async def test_a_judge_at_an_endpoint_answers_with_the_key_and_the_model_of_its_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny"}, {"id": "large"}]})

    async def chat(request: Request) -> Response:
        asked.append((request.headers["authorization"], await request.json()))
        choice = {"message": {"role": "assistant", "content": "no: yes"}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": 2}})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), host="127.0.0.1", port=0, name="endpoint")
    url = f"{await server.start()}/v1"
    reward = {**JUDGE, "policy": "", "url": url, "model": "large", "key_variable": "JUDGE_KEY"}
    scores = ScoringPool(tasks({**reward, "max_tokens": 7}))
    with pytest.raises(ConfigError, match=r"key_variable = 'JUDGE_KEY' of .* is not set"):
        await scores.start()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    await scores.start()
    assert await scores.score(TASK, "5") == 1.0
    await scores.close()
    await server.stop()
    ((key, body),) = asked
    assert (key, body["model"], body["max_tokens"]) == ("Bearer secret", "large", 7)
    assert body["messages"] == [{"role": "user", "content": "2+3 5 5?"}]


async def test_a_question_leaves_room_for_a_reply_and_has_a_seed_of_its_own() -> None:
    engine = ScriptedEngine("yes")
    scores = scoring(engine, JUDGE)
    for text in ("5", "5", "6"):
        await scores.score(TASK, text)
    await scores.close()
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == seeds[1] != seeds[2]
    assert engine.requests[0].version == -1
    num_asked = len(engine.requests[0].token_ids)
    barely = ScriptedEngine("no", max_context=num_asked + 1)
    scores = scoring(barely, JUDGE)
    await scores.score(TASK, "5")
    await scores.close()
    assert barely.requests[0].sampling.max_tokens == 1
    scores = scoring(ScriptedEngine("no", max_context=num_asked), JUDGE)
    with pytest.raises(RolloutError, match=f"has {num_asked} tokens, its context {num_asked}") as failure:
        await scores.score(TASK, "5")
    await scores.close()
    assert not failure.value.is_retryable


class AbortingEngine(ScriptedEngine):
    """Aborts every request in the middle, as an engine that is going away may do."""

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        return msgspec.structs.replace(generation, finish_reason="abort")


async def test_a_reply_that_was_aborted_is_no_verdict() -> None:
    scores = scoring(AbortingEngine("no, well"), {**JUDGE, "unclear": 0.0})
    with pytest.raises(RolloutError, match="q: the judge's engine aborted its reply") as failure:
        await scores.score(TASK, "5")
    await scores.close()
    assert failure.value.is_retryable


async def test_what_is_judged_cannot_bring_marks_of_its_own() -> None:
    engine = ScriptedEngine("no")
    scores = scoring(engine, JUDGE)
    await scores.score(TASK, "{answer}")
    await scores.close()
    assert "2+3 5 {answer}?" in "".join(map(chr, engine.requests[0].token_ids))


async def test_a_judge_is_one_of_several_rewards_and_factors_and_format_scale_it() -> None:
    tags = {"name": "format", "pattern": ".*!", "otherwise": 0.5}
    reward = {
        "name": "weighted",
        "rewards": {"right": {"name": "exact"}, "judged": JUDGE, "tags": tags},
        "weights": {"judged": 2.0},
        "factors": ["tags"],
    }
    scores = scoring(ScriptedEngine("yes"), reward, format="5", format_weight=0.2)
    await scores.start()
    score = await scores.score(TASK, "5")
    await scores.close()
    # (1 - 0.2) * 0.5 * (1 + 2 * 1) + 0.2
    assert score == pytest.approx(0.8 * 0.5 * 3 + 0.2)
    assert score.parts["reward/judged"] == 1.0


async def test_a_text_without_the_part_that_is_judged_is_not_shown_to_the_judge() -> None:
    engine = ScriptedEngine("yes")
    scores = scoring(engine, JUDGE, extract="answer_tag")
    assert await scores.score(TASK, "5") == 0.0
    await scores.close()
    assert engine.requests == []


async def test_a_judge_that_is_not_served_fails_the_episode() -> None:
    made = ScoringPool(tasks({**JUDGE, "policy": "other"}))
    made.policies = {}
    with pytest.raises(RolloutError, match=r"policy 'other', is not served .*\(none is\)") as failure:
        await made.score(TASK, "5")
    assert not failure.value.is_retryable
    await made.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": ""}, "the model is either a `policy` or the one at a `url`"),
        ({"url": "http://x/v1"}, "the model is either a `policy` or the one at a `url`"),
        ({"policy": "", "url": "x"}, "url = 'x' is not a URL"),
        ({"model": "m"}, "model and key_variable belong to `url`"),
        ({"prompt": "Right?"}, "prompt must contain {text}"),
    ],
)
def test_mistakes_are_told(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks({**JUDGE, **fields})
