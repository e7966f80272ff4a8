"""Handlers of the routes for unfinished episodes: services report what they sampled, for later attempts.

A report is passed on to other services. So it is checked like a result, by the same rules: a token outside
the vocabulary would break the engine that continues from it.
"""

import logging
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from astraflow.dataflow.service.ingest import PolicyLimits, check_results
from astraflow.dataflow.service.partial_episodes import Verdict, episode_of
from astraflow.dataflow.service.result_recorder import ResultRecorder
from astraflow.dataflow.service.routes_shared import ServedRun, read_body
from astraflow.service.messages import item_response
from astraflow.types import (
    EarlierProgress,
    Episode,
    EpisodeResult,
    PastCompletion,
    Progress,
    ProgressReply,
    ProgressReport,
    Trajectory,
    Turn,
    lease_kind,
)

__all__ = ["ProgressRoutes"]

_log = logging.getLogger(__name__)
_ID_BYTES = 4


class ProgressRoutes:
    """One method per route."""

    def __init__(self, run: ServedRun, recorder: ResultRecorder) -> None:
        self._run = run
        self._core = run.dispatcher.core
        self._recorder = recorder

    async def tell(self, request: Request) -> Response:
        """`POST /v1/workers/{worker_id}/progress`: changes only soft state."""
        report = await read_body(request, ProgressReport)
        worker = self._run.known_worker(str(request.path_params["worker_id"]))
        held = set(self._core.worker_leases(worker.id))
        mine = [p for p in report.parts if p.lease_id in held and lease_kind(p.lease_id) == "train"]
        wrong = self._find_wrong(worker.id, worker.hosts, mine)
        verdicts: dict[str, Verdict] = {part.lease_id: "refused" for part in report.parts}
        for part in mine:
            if part.lease_id in wrong:
                continue
            verdicts[part.lease_id] = self._run.progress.add(part)
            if verdicts[part.lease_id] != "kept":
                wrong.add(part.lease_id)  # later parts would leave a gap, so they are refused too
        reply = ProgressReply(
            missing=tuple(lease_id for lease_id, verdict in verdicts.items() if verdict == "missing"),
            refused=tuple(lease_id for lease_id, verdict in verdicts.items() if verdict == "refused"),
        )
        return item_response(reply, request)

    async def earlier(self, request: Request) -> Response:
        """`GET /v1/workers/{worker_id}/progress/{lease_id}`."""
        worker = self._run.known_worker(str(request.path_params["worker_id"]))
        lease_id = str(request.path_params["lease_id"])
        is_held = lease_id in self._core.worker_leases(worker.id) and lease_kind(lease_id) == "train"
        completions = self._run.progress.completions(episode_of(lease_id)) if is_held else ()
        return item_response(EarlierProgress(completions=completions), request)

    async def totals(self, request: Request) -> Response:
        """`GET /v1/progress`."""
        return item_response(self._run.progress.totals, request)

    def _find_wrong(self, worker_id: str, hosts: Sequence[str], parts: Sequence[Progress]) -> set[str]:
        """The leases with a completion that violates a rule; the log says which rule."""
        limits = self._recorder.limits()
        results: list[EpisodeResult] = []
        for part in parts:
            # The rules are written for trajectories, so completions become some without context.
            trajectories = tuple([_as_trajectory(completion, limits) for completion in part.completions])
            episode = Episode(trajectories=trajectories, score=0.0)
            results.append(EpisodeResult(lease_id=part.lease_id, outcome=episode))
        wrong = check_results(results, policies=limits, hosts=hosts, are_parts=True)
        for idx, problem in wrong.items():
            _log.warning("%s: the progress of %s is not stored: %s", worker_id, parts[idx].lease_id, problem)
        return {parts[idx].lease_id for idx in wrong}


def _as_trajectory(completion: PastCompletion, limits: Mapping[str, PolicyLimits]) -> Trajectory:
    num_tokens = len(completion.token_ids) // _ID_BYTES
    known = limits.get(completion.policy)
    return Trajectory(
        policy=completion.policy,
        role=completion.policy,
        token_ids=completion.token_ids,
        mask=b"\1" * num_tokens,
        behavior_logprobs=completion.logprobs,
        versions=completion.versions,
        temperature=known.info.sampling.temperature if known else 0.0,
        finish_reason=completion.finish_reason,
        turns=(Turn(start=0, end=num_tokens),),
        reward=0.0,
        streams=completion.streams,
    )
