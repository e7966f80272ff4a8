"""Scores a completion under any policy, and under another prompt than the one that it was sampled from."""

from dataclasses import dataclass

import numpy as np

from astraflow.errors import RolloutError
from astraflow.protocols import Engine, TokenScores, TopScorer
from astraflow.rollout.dialogue import Dialogue, HostedPolicy, Transcript, render_prompt
from astraflow.types import Message
from astraflow.workflows.conversation import Completion, Prompt

__all__ = ["Scoring"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """A completion, who scores it, and under which prompt.

    Example: `await Scoring(dialogue, hosted, answer, "a hint").scores(hosted.engine, 0, temperature=1.0)`.
    """

    dialogue: Dialogue
    hosted: HostedPolicy
    completion: Completion
    context: Prompt | None

    async def scores(self, engine: Engine, num_top: int, *, temperature: float) -> TokenScores:
        """Scores the completion, with the `num_top` most likely tokens in place of each. Raises:
        RolloutError."""
        token_ids, start = await self._tokens(engine)
        if not self.completion.num_tokens:
            none = np.zeros((0, num_top), np.float32)
            return TokenScores(none[:, :0].ravel(), none.astype(np.int32), none)
        # Scores begin with the second token, so that of token t is entry t - 1.
        if temperature == 1 and not num_top:
            logprobs = (await engine.score(token_ids))[start - 1 :]
            none = np.zeros((len(logprobs), 0), np.float32)
            return TokenScores(logprobs, none.astype(np.int32), none)
        if not isinstance(engine, TopScorer):
            raise RolloutError(
                f"policy {self.hosted.info.name}: its engine scores the given tokens only, at temperature 1; "
                "use rollout.engine.name torch, vllm or sglang",
                is_retryable=False,
            )
        logprobs, top_ids, top_logprobs = await engine.score_top(token_ids, num_top, temperature=temperature)
        return TokenScores(logprobs[start - 1 :], top_ids[start - 1 :], top_logprobs[start - 1 :])

    async def _tokens(self, engine: Engine) -> tuple[tuple[int, ...], int]:
        """The prompt and the completion, and the length of the prompt. Raises: RolloutError."""
        completion = self.completion
        hosted = self.hosted
        name = hosted.info.name
        token_ids, start = self.dialogue.recorder.tokens_of(completion.idx)
        has_media = self.dialogue.recorder.has_media(completion.idx)
        # The tokens mean something to another policy only if both have the same tokenizer.
        _, read = hosted.read(token_ids[:start], token_ids[start:])
        if read != completion.text:
            raise RolloutError(
                f"policy {name} reads a completion of {completion.policy} as {read[:80]!r} instead of "
                f"{completion.text[:80]!r}; policies that score each other need the same tokenizer",
                is_retryable=False,
            )
        if (context := self.context) is not None:
            messages = [Message(role="user", content=context)] if isinstance(context, str) else context
            prompt = await render_prompt(hosted, Transcript(), tuple(messages))
            has_media = bool(prompt.media)
            token_ids = (*prompt.token_ids, *token_ids[start:])
            start = len(prompt.token_ids)
        max_context = engine.capacity().max_context
        if len(token_ids) > max_context:
            raise RolloutError(
                f"policy {name} cannot score {len(token_ids)} tokens: the context of its engine has "
                f"{max_context} tokens; raise rollout.engine.max_context",
                is_retryable=False,
            )
        if has_media:
            raise RolloutError(
                f"policy {name} cannot score a completion whose prompt has an image: engines score only text "
                "tokens",
                is_retryable=False,
            )
        return token_ids, start
