"""The numbered rules of the protocol, as docs/protocol.md states them; a test compares the two.

`C` rules are about token columns, `D` about the dataflow, `W` about a rollout service (worker), `T` about a
trainer. A rule keeps its number for ever; a new one takes the next.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["RULES", "Part", "Rule"]

Part = Literal["columns", "dataflow", "rollout", "trainer"]
_SECTIONS: dict[str, str] = {
    "C": "Token columns",
    "D": "Rules of the dataflow",
    "W": "Rules of a rollout service",
    "T": "Rules of a trainer",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `id` is a letter and a number, `text` one sentence."""

    id: str
    text: str

    @property
    def section(self) -> str:
        """The heading of docs/protocol.md under which the rule stands."""
        return _SECTIONS[self.id[0]]


_COLUMNS = {
    "C1": "The three columns, and every stream, have the same number of entries, at least one.",
    "C2": "`mask` holds 0 and 1 only, and at least one 1.",
    "C3": "`behavior_logprobs` are finite, at most 0 (tolerance 1e-3), and 0 where `mask` is 0.",
    "C4": "`versions` are runs `[start, length, version]`, in order, that cover exactly the tokens with "
    "mask 1; none is newer than the newest published version.",
    "C5": "`turns` are in order, do not overlap, and hold every token with mask 1; `score`, `reward` and the "
    "turns' rewards are finite.",
    "C6": "Token ids are at least 0 and below the number of rows of the policy's embedding table.",
    "C7": "`temperature` is the policy's in a training episode.",
    "C8": "`policy` is one that the service registered as hosting.",
    "C9": "`score`, `reward` and the turns' rewards are within +-1e6, and metrics within +-1e15.",
    "C10": "A turn of a training episode holds at most `sampling.max_tokens` tokens with mask 1, and no "
    "trajectory is longer than its model's context.",
}

_DATAFLOW = {
    "D1": "`GET /v1/run` names the protocol, the run and at least one policy.",
    "D2": "JSON and msgpack bodies of the same item mean the same; the answer is JSON unless `Accept` names "
    "msgpack.",
    "D3": "Every refusal has a status of 400 or more and a body with `code` and `message`.",
    "D4": "A body with an unknown field or a wrong type is refused with 400 and changes nothing.",
    "D5": "A peer that names another protocol is refused with 400 `protocol_version`.",
    "D6": "A policy that the run does not have is refused with 404 `unknown_policy`.",
    "D7": "A rollout service that is not known is refused with 404 `unknown_worker`.",
    "D8": "Fingerprints that differ from the run's are refused with 409 `fingerprint`.",
    "D9": "A service that serves no version within `max_lag` of the newest gets no training lease.",
    "D10": "A request gets at most `num_free` leases, and no episode is out twice.",
    "D11": "Receipts come one a result, in order; a sound first result is `accepted`.",
    "D12": "A result that is sent again is not refused, and counts once.",
    "D13": "A trajectory that breaks a rule of the token columns gets a receipt `invalid` with the reason, "
    "and its episode goes out again.",
    "D14": "An episode whose attempt failed goes out again as the next attempt, with the same task and seed.",
    "D15": "A lease without heartbeats for `lease_timeout_s` goes out again; heartbeats keep it alive.",
    "D16": "The first valid result of any attempt counts; a later one is `dropped`.",
    "D17": "A draining service gets no further lease; results of those that it holds are taken.",
    "D18": "A granted lease that is missing in `held` goes out again at once.",
    "D19": "A lease of kind `eval` goes only to a service that serves exactly its `pinned` versions.",
    "D20": "A new session fences the older ones: each of their requests is refused with 409 `fenced`.",
    "D21": "Only `next_version`, then each time one more, can be published; posting the newest manifest "
    "again changes nothing.",
    "D22": "The first publication of a session is full, and a delta's base is a version that is kept.",
    "D23": "`GET .../versions` gives the manifests newer than `after`, oldest first, as they were published.",
    "D24": "A step has one batch for ever: asked again, in this session or a later one, it is the same.",
    "D25": "The slices of a batch are disjoint, together hold all of its samples, and carry its totals.",
    "D26": "A batch holds whole groups, trajectories as they were sent, and an advantage for each token with "
    "mask 1.",
    "D27": "A step is committed after its version is published, in order; repeating a commit changes "
    "nothing.",
    "D28": "A released step is not served again, and no session begins before it.",
    "D29": "What was answered with success survives a crash of the dataflow.",
    "D30": "`drawn` is the sum of all fates and of the live groups in `GET /v1/status`.",
    "D31": "If the run has tokens, a request without a valid one is refused with 401 `unauthorized`.",
    "D32": "Once the run is over, requests that wait are answered with its state, and no lease or batch goes "
    "out.",
    "D33": "A lease is answered by the service that it was granted to; another one's result is `dropped`.",
}

_ROLLOUT = {
    "W1": "It registers before it asks for anything of a worker, with the protocol's number, a valid name, "
    "policies of the run, and at least one slot.",
    "W2": "Every body is an item of the protocol, without unknown fields.",
    "W3": "Every request carries the token, if the run has one.",
    "W4": "It sends a heartbeat about every `heartbeat_s`, also while another request waits for its answer.",
    "W5": "Its heartbeats name every lease that it holds: those that run, and those whose results have no "
    "receipt yet.",
    "W6": "It asks for leases only with versions that were published, and that it has verified: bytes that "
    "do not have a manifest's hashes are never served.",
    "W7": "A version that it cannot install leaves the one before serving; it takes up the next good one.",
    "W8": "Each lease gets one result, sent until a receipt comes, also after an answer that it cannot read "
    "or a 503.",
    "W9": "A result with a receipt, whatever it says, is not sent again.",
    "W10": "`behavior_logprobs` are those of a full forward under the version named for the token, also when "
    "a version comes while the episode runs.",
    "W11": "A new version ends or fails no episode that runs.",
    "W12": "An evaluation whose pinned version it does not serve is sent back as a failure, never as an "
    "episode.",
    "W13": "After 404 `unknown_worker` it registers again and goes on under the new id.",
    "W14": "A service that is told that it is draining asks for no further lease, and sends the results of "
    "those that it holds.",
    "W15": "Once `state` is `finished` or `failed` it leaves.",
    "W16": "A service that is told to stop (SIGTERM) drains: it sends what it has finished, says goodbye by "
    "`drain`, and ends.",
    "W17": "An episode that can be run is run; it is not sent back as a failure.",
}

_TRAINER = {
    "T1": "It opens a session before anything else, with the protocol's number and the steps of its "
    "checkpoint.",
    "T2": "Every body is an item of the protocol, without unknown fields.",
    "T3": "Every request carries the token, if the run has one.",
    "T4": "Its first publication is `next_version`, in full, holds `step` steps, and names the model's "
    "files.",
    "T5": "A version is whole at its sources before it is published: its chunks have their hashes, its "
    "tensors its digest.",
    "T6": "Version numbers go up by one with each publication, and each holds one step more.",
    "T7": "All versions of a policy have the same tensors: names, shapes and dtypes.",
    "T8": "It takes the steps in order, under its session's epoch, at most one beyond the committed ones, "
    "and none beyond `num_steps`.",
    "T9": "An answer without a batch is followed by the same question.",
    "T10": "It commits a step with the version that holds it, after the publication is answered.",
    "T11": "After a lost answer or a 503 it repeats the same request.",
    "T12": "A batch with advantages changes the weights.",
    "T13": "Fenced, it makes no further request under that session, and stops.",
    "T14": "It releases only committed steps, and only those that a durable checkpoint holds: restarted, it "
    "begins no earlier.",
    "T15": "Restarted after a crash it opens a new session at its checkpoint, publishes what it loaded, and "
    "takes the same steps again.",
    "T16": "The versions that an answer calls `needed` stay downloadable.",
    "T17": "Once the run is over, or all steps are done, it ends without an error.",
    "T18": "Metrics and spans of a commit are finite numbers.",
}

RULES: dict[str, Rule] = {
    id_: Rule(id_, text) for part in (_COLUMNS, _DATAFLOW, _ROLLOUT, _TRAINER) for id_, text in part.items()
}
"""By id."""
