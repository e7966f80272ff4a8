"""The workflow `supervised`: a conversation becomes an episode whose replies are given, not sampled.

Prompts are rendered, extended, and forked as in a rollout, and the recorder keeps the tokens. So a trained
turn has the context that the policy would have had. Logprobs are those of the policy's newest version.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.addons.supervised.chats import Chat, UnfitRowError
from astraflow.addons.supervised.replies import ReplyWriter
from astraflow.errors import RolloutError
from astraflow.rollout.dialogue import HostedPolicy, RecordedConversation, Transcript, render_prompt
from astraflow.rollout.recorder import Speaker
from astraflow.trajectory_rules import MIN_LOGPROB
from astraflow.types import GenerateRequest, Generation, Message, Sampling
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import policy_at

__all__ = ["Supervised"]

_log = logging.getLogger(__name__)
_LONG = 16_384
"""Number of tokens from which a reply is written in a thread, as its template may take a second."""
_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Reply:
    """A trained reply: its prompt, and the conversation with it."""

    prompt: Transcript
    said: Transcript


class Supervised:
    """The workflow. Rows that don't fit train nothing: `episode/left_out` counts them, and the log names each
    once."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._writers: dict[str, ReplyWriter] = {}
        self._named: set[str] = set()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        rewards = Rewards()
        chat = msgspec.json.decode(task.spec, type=Chat)
        try:
            opened = policy_at(policies, self._policy, 0).conversation(tools=chat.tools)
            assert isinstance(opened, RecordedConversation)
            replies = await self._write(opened.hosted, chat, rewards)
        except (UnfitRowError, RolloutError) as err:
            if isinstance(err, RolloutError) and err.is_retryable:
                raise
            self._leave_out(task.id, err, rewards)
            return rewards
        mean = float((await _record(opened, replies)).mean())
        opened.rewrite(replies[-1].said.messages)
        rewards.add(opened, math.exp(mean))
        rewards.set_score(math.exp(mean))
        rewards.add_metric("nll", -mean)
        rewards.add_metric("left_out", 0.0, "sum")
        return rewards

    async def _write(self, hosted: HostedPolicy, chat: Chat, rewards: Rewards) -> list[_Reply]:
        """Writes the trained replies, and counts those whose tokens are another tokenizer's.

        Raises: UnfitRowError or RolloutError if the row doesn't fit.
        """
        writer = self._writers.get(hosted.info.name)
        if writer is None:
            if hosted.model_dir is None:
                raise RolloutError("the model has no folder with a chat template", is_retryable=False)
            args = msgspec.json.decode(hosted.info.template_args)
            writer = await asyncio.to_thread(ReplyWriter, hosted.model_dir, args, hosted.renderer.stop_ids)
            self._writers[hosted.info.name] = writer
        said = Transcript()
        new: list[Message] = []
        replies: list[_Reply] = []
        known = {idx for idx in range(len(chat.turns)) if writer.has_tokens(chat, idx)}
        num_given = sum(turn.token_ids is not None for turn in chat.turns)
        rewards.add_metric("retokenized", num_given - len(known), "sum")
        for idx, turn in enumerate(chat.turns):
            if turn.role != "assistant" or (
                not turn.train and idx not in known and idx < max(known, default=-1)
            ):
                new.append(Message(role=turn.role, content=turn.text, name=turn.name or ""))
                continue
            if idx in known:
                prompt = Transcript((*said.messages, *new), tuple(turn.prompt_token_ids or ()))
                ids = tuple(turn.token_ids or ())
            else:
                prompt = await render_prompt(hosted, said, tuple(new))
                tag, _ = hosted.read(prompt.token_ids, ())
                if not prompt.token_ids:
                    raise UnfitRowError("refused_by_template", f"message {idx + 1} (assistant) has no prompt")
                write = partial(writer.reply, chat, idx, tag, hosted.call_format)
                is_long = len(prompt.token_ids) > _LONG
                ids = await asyncio.to_thread(write) if is_long else write()
            reply = Message(role="assistant", content=hosted.read(prompt.token_ids, ids)[1])
            said = Transcript((*prompt.messages, reply), (*prompt.token_ids, *ids), prompt.media)
            new = []
            if turn.train:
                replies.append(_Reply(prompt, said))
        if (num := len(replies[-1].said.token_ids)) > hosted.max_context:
            text = f"{num} tokens don't fit into rollout.engine.max_context = {hosted.max_context}"
            raise UnfitRowError("too_long", text)
        return replies

    def _leave_out(self, task_id: str, err: UnfitRowError | RolloutError, rewards: Rewards) -> None:
        kind = err.kind if isinstance(err, UnfitRowError) else "refused_by_template"
        rewards.set_score(0.0)
        rewards.add_metric("left_out", 1.0, "sum")
        rewards.add_metric(f"left_out/{kind}", 1.0, "sum")
        if task_id not in self._named:
            self._named.add(task_id)
            source, _, idx = task_id.rpartition("/")
            _log.warning("%s: row %d is left out (%s): %s", source, int(idx.partition(".")[0]) + 1, kind, err)


async def _record(opened: RecordedConversation, replies: list[_Reply]) -> _Floats:
    """Records replies with their logprobs under the newest version, and returns the logprobs."""
    engine = opened.hosted.engine
    name = opened.hosted.info.name
    # An engine says only with a token which version it serves.
    first = GenerateRequest(token_ids=replies[0].said.token_ids[:1], sampling=Sampling(max_tokens=1))
    version = (await engine.generate(first)).versions[-1]
    scored: list[tuple[tuple[int, ...], _Floats]] = []
    for reply in reversed(replies):  # a later one usually contains those before it
        ids = reply.said.token_ids
        if not any(known[: len(ids)] == ids for known, _ in scored):
            scored.append((ids, await engine.score(ids)))
    found: list[_Floats] = []
    for reply in replies:
        ids = reply.said.token_ids
        start = len(reply.prompt.token_ids)
        whole = next(values for known, values in scored if known[: len(ids)] == ids)
        found.append(np.maximum(whole[start - 1 : len(ids) - 1], MIN_LOGPROB))
        generation = Generation(
            token_ids=ids[start:],
            logprobs=tuple(found[-1].tolist()),
            versions=(version,) * (len(ids) - start),
            finish_reason="stop",
        )
        speaker = Speaker(name, name, temperature=1.0)
        opened.dialogue.recorder.record(
            speaker, opened.idx, ids[:start], generation, media=reply.prompt.media
        )
    return np.concatenate(found)
