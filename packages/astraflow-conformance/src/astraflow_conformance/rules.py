"""The numbered rules of the protocol. docs/protocol/rules.md is generated from them.

`C` rules are about token columns, `D` rules about the dataflow, `W` rules about a rollout service (worker),
and `T` rules about a trainer. Rules keep their numbers forever, and a new rule gets the next number.
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
    """One rule. `id` is a letter and a number. `text` says what the rule demands."""

    id: str
    text: str

    @property
    def section(self) -> str:
        """The heading in docs/protocol/rules.md under which the rule is listed."""
        return _SECTIONS[self.id[0]]


_COLUMNS = {
    "C1": "The three columns, and every stream, have the same number of entries, at least one.",
    "C2": "`mask` contains only 0 and 1, and at least one 1. In a training episode, the first token has "
    "mask 0.",
    "C3": "`behavior_logprobs` are finite, at most 0 (tolerance 1e-3), and 0 where `mask` is 0; in a "
    "training episode, at least -88.",
    "C4": "`versions` are spans `[start, length, version]`, in order, that cover exactly the tokens "
    "with mask 1; no version is newer than the newest published one.",
    "C5": "`turns` are in order, do not overlap, and contain every token with mask 1; `score`, "
    "`reward` and the rewards of turns are finite.",
    "C6": "Token ids are at least 0 and below the number of rows of the policy's embedding table.",
    "C7": "In a training episode, `temperature` is the policy's sampling temperature.",
    "C8": "`policy` is one that the service named in `hosts` when it registered.",
    "C9": "`score`, `reward` and the rewards of turns are within +-1e6, and metrics within +-1e15.",
    "C10": "In a training episode, a turn has at most `sampling.max_tokens` tokens with mask 1, and no "
    "trajectory is longer than its model's context.",
}

_DATAFLOW = {
    "D1": "`GET /v1/run` names the protocol, the run and at least one policy.",
    "D2": "JSON and msgpack bodies of the same item mean the same; the answer is JSON unless `Accept` "
    "names msgpack.",
    "D3": "Every refusal has a status of 400 or more and a body with `code` and `message`.",
    "D4": "A body with an unknown field or a wrong type is refused with 400 and changes nothing.",
    "D5": "A peer that names another protocol is refused with 400 `protocol_version`.",
    "D6": "A policy that the run does not have is refused with 404 `unknown_policy`.",
    "D7": "A rollout service that is not known is refused with 404 `unknown_worker`.",
    "D8": "Fingerprints that differ from the run's are refused with 409 `fingerprint`.",
    "D9": "A service that serves no version within `max_lag` of the newest gets no training lease.",
    "D10": "A request gets at most `num_free` leases, and no episode has two leases at the same time.",
    "D11": "There is one receipt per result, in the same order; a valid first result is `accepted`.",
    "D12": "A result that is sent again is not refused, and it counts once.",
    "D13": "A trajectory that breaks a rule of the token columns gets the receipt `invalid` with the "
    "reason, and its episode is leased again.",
    "D14": "An episode whose attempt failed is leased again as the next attempt, with the same task "
    "and seed.",
    "D15": "A lease without heartbeats for `lease_timeout_s` is leased again; heartbeats keep it alive.",
    "D16": "The first valid result of any attempt counts; a later one is `dropped`.",
    "D17": "A draining service gets no further leases; results of the leases that it holds are accepted.",
    "D18": "A granted lease that is missing in `held` is leased again at once.",
    "D19": "A lease of kind `eval` goes only to a service that serves exactly its `pinned` versions.",
    "D20": "A new session fences the older ones: each of their requests is refused with 409 `fenced`.",
    "D21": "The first version of a session is `next_version`, and each later one is one higher; no "
    "other number can be published. Posting the newest manifest again changes nothing.",
    "D22": "The first publication of a session is a full version, and the base of a delta is a version "
    "that is still kept.",
    "D23": "`GET .../versions` returns the manifests newer than `after`, oldest first, as they were "
    "published.",
    "D24": "The batch of a step never changes: asked for again, in this session or a later one, it is "
    "the same.",
    "D25": "The slices of a batch are disjoint, together contain all of its samples, and carry the "
    "totals of the whole batch.",
    "D26": "A batch contains whole groups, the trajectories as they were sent, and an advantage for "
    "each token with mask 1.",
    "D27": "A step can be committed only after its version is published, and in order; repeating a "
    "commit changes nothing.",
    "D28": "A released step is not served again, and no session starts before it.",
    "D29": "Whatever was answered with success survives a crash of the dataflow.",
    "D30": "In `GET /v1/status`, `drawn` is the sum of all fates and of the live groups.",
    "D31": "If the run has tokens, a request without a valid one is refused with 401 `unauthorized`.",
    "D32": "Once the run is over, waiting requests are answered with its state, and no more leases or "
    "batches are given out.",
    "D33": "Only the service that a lease was granted to can answer it; a result from another service "
    "is `dropped`.",
    "D34": "If it accepts reports of unfinished episodes, the next attempt gets what was reported for an "
    "episode whose lease was lost, and nothing for one that failed.",
}

_ROLLOUT = {
    "W1": "It registers before it sends any other request of a worker, with the version of the "
    "protocol, a valid name, policies of the run, and at least one slot.",
    "W2": "Every body is an item of the protocol, without unknown fields.",
    "W3": "Every request carries the token, if the run has one.",
    "W4": "It sends a heartbeat about every `heartbeat_s`, even while another request waits for its answer.",
    "W5": "Its heartbeats name every lease that it holds: running ones, and those whose results have "
    "no receipt yet.",
    "W6": "It names in its requests for leases only versions that were published and that it has "
    "verified; bytes that do not match the hashes of a manifest are never served.",
    "W7": "If it cannot install a version, it continues to serve the previous one, and installs the "
    "next good one.",
    "W8": "It sends one result per lease, and repeats it until it gets a receipt, also after a 503 or "
    "an answer that it cannot read.",
    "W9": "It does not repeat a result that has a receipt, whatever the receipt says.",
    "W10": "`behavior_logprobs` are those of a full forward pass under the version named for the "
    "token, even if a new version arrives during the episode.",
    "W11": "A new version neither ends nor fails a running episode.",
    "W12": "It answers an evaluation lease whose pinned version it does not serve with a failure, "
    "never with an episode.",
    "W13": "After 404 `unknown_worker` it registers again and continues under the new id.",
    "W14": "When it is told that it is draining, it asks for no more leases, and sends the results of "
    "those that it holds.",
    "W15": "It leaves once `state` is `finished` or `failed`.",
    "W16": "When it is told to stop (SIGTERM), it drains: it sends the results that are finished, "
    "calls `drain`, and ends.",
    "W17": "It runs every episode that can be run, and does not send it back as a failure.",
}

_TRAINER = {
    "T1": "It opens a session before anything else, with the version of the protocol and the number of "
    "steps in its checkpoint.",
    "T2": "Every body is an item of the protocol, without unknown fields.",
    "T3": "Every request carries the token, if the run has one.",
    "T4": "Its first publication is `next_version`: a full version that contains `step` steps and "
    "names the files of the model.",
    "T5": "A version is complete at its sources before it is published: the chunks match their "
    "hashes, and the tensors match the digest.",
    "T6": "Each publication has the next version number and contains one step more.",
    "T7": "All versions of a policy have the same tensors: names, shapes and dtypes.",
    "T8": "It takes the steps in order, under the epoch of its session, at most one step beyond the "
    "committed ones, and none beyond `num_steps`.",
    "T9": "After an answer without a batch it asks again.",
    "T10": "It commits a step with the version that contains it, after the publication is answered.",
    "T11": "After a lost answer or a 503 it repeats the same request.",
    "T12": "A batch with advantages changes the weights.",
    "T13": "When it is fenced, it sends no more requests under that session, and stops.",
    "T14": "It releases only steps that are committed and contained in a durable checkpoint; after a "
    "restart it starts no earlier than the released steps.",
    "T15": "After a crash it opens a new session at its checkpoint, publishes what it loaded, and "
    "takes the same steps again.",
    "T16": "The versions that an answer lists as `needed` stay downloadable.",
    "T17": "It ends without an error once the run is over or all steps are done.",
    "T18": "The metrics and spans of a commit are finite numbers.",
}

RULES: dict[str, Rule] = {
    id_: Rule(id_, text) for part in (_COLUMNS, _DATAFLOW, _ROLLOUT, _TRAINER) for id_, text in part.items()
}
"""Rules by id."""
