"""A teacher behind an OpenAI-compatible endpoint that gives prompt logprobs.

It scores token ids by `POST BASE_URL/completions` with `prompt_logprobs`, which vLLM has and OpenAI's own
API lacks. So it must have the policy's tokenizer, which `check_tokens` compares before a run. Connection
errors and the statuses 408, 429, 500, 502, 503, and 504 are retried with growing pauses, as `OpenAiEngine`
does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.inference_servers.model_choice import ModelChoice
from astraflow.addons.inference_servers.openai_engine import OpenAiEngine
from astraflow.addons.inference_servers.server_api import NEUTRAL, check_scoring
from astraflow.addons.inference_servers.vllm_api import read_scores
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import TokenScores

__all__ = ["EndpointTeacher"]

_PROBE_IDS = (1, 2, 3)


class EndpointTeacher(OpenAiEngine):
    """Scores the tokens of a policy. Example: `await EndpointTeacher(choice).score((5, 9, 3))`."""

    def __init__(self, choice: ModelChoice) -> None:
        """Raises: ConfigError if the endpoint's key is not set here."""
        super().__init__(choice.url, model=choice.model, api_key=choice.api_key())

    async def check_scores(self, num: int) -> None:
        """Checks that the endpoint gives prompt logprobs, and those of `num` likely tokens.

        Raises: UnavailableError if it doesn't answer; ConfigError if it can't.
        """
        await self.check()
        try:
            await self.score_top(_PROBE_IDS, num)
        except RolloutError as err:
            if err.is_retryable:
                raise
            raise ConfigError(f"the teacher at {self._base_url} can't score tokens: {err}") from err

    async def check_tokens(self, text: str, token_ids: Sequence[int]) -> None:
        """Checks that the endpoint reads a text as these tokens. Raises: as `check_scores`."""
        await self.check()
        options = {"add_special_tokens": False, "return_token_ids": True}
        reply = await self._complete(text, 0, options)
        found = reply.get("prompt_token_ids")
        if found is None:
            raise ConfigError(
                f"the teacher at {self._base_url} doesn't tell its tokens (return_token_ids), so its "
                "tokenizer can't be compared; serve it with vLLM"
            )
        if list(found) != list(token_ids):
            raise ConfigError(
                f"the teacher at {self._base_url} has another tokenizer than the policy: it reads {text!r} "
                f"as {list(found)} instead of {list(token_ids)}; use a teacher with the policy's tokenizer"
            )

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1. Raises: RolloutError."""
        return (await self.score_top(token_ids, 0)).logprobs

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each. Raises: RolloutError."""
        check_scoring(temperature)
        choice = await self._complete(list(token_ids), num, {})
        rows = choice.get("prompt_logprobs")
        if rows is None:
            raise RolloutError(f"{self._base_url} gives no prompt_logprobs", is_retryable=False)
        try:
            return read_scores(rows, token_ids, num)
        except (KeyError, TypeError, ValueError) as err:
            raise RolloutError(
                f"{self._base_url}: unexpected prompt_logprobs: {str(rows)[:300]}", is_retryable=False
            ) from err

    async def _complete(
        self, prompt: str | list[int], num: int, options: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """The reply's choice for a prompt and one more token. Raises: RolloutError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": num, **options}
        body |= {"temperature": 0.0, "top_p": 1.0, **NEUTRAL}
        async with self._slots:
            reply = await self._ask(body, "/completions")
        try:
            return dict(reply["choices"][0])
        except (LookupError, TypeError, ValueError) as err:
            raise RolloutError(f"{self._base_url}/completions answered {str(reply)[:300]}") from err
