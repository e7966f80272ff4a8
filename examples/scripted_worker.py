"""A rollout service that uses only the protocol in docs/protocol. It answers with random tokens.

A real service fetches the weights of the versions that it names, renders the task's prompt with the policy's
chat template, generates and scores an answer, and reports the logprobs that it sampled with.
Usage: python scripted_worker.py http://127.0.0.1:8000 [TOKEN]
"""

import random
import struct
import sys
import threading
import time
from base64 import b64encode

import requests

PROMPT, CHOICES, LOGPROB = [1, 2, 3], range(10), -2.3  # token ids below every policy's vocabulary


def call(session, method, path, body=None):
    """Sends and receives JSON; retries while the dataflow doesn't answer or answers 503."""
    for attempt in range(8):
        try:
            reply = session.request(method, session.url + path, json=body, timeout=40)
            if reply.status_code != 503:
                return reply
        except requests.RequestException:
            pass
        time.sleep(0.1 * 2**attempt)
    raise SystemExit(f"{session.url} does not answer")


def trajectory(policy, version):
    """Columns are base64 of little-endian int32, uint8, and float32; prompts have mask and logprob 0."""
    sampled = random.choices(CHOICES, k=4)
    start, end = len(PROMPT), len(PROMPT) + len(sampled)
    logprobs = struct.pack(f"<{end}f", *[0.0] * start, *[LOGPROB] * len(sampled))
    item = {"policy": policy["name"], "role": policy["name"], "finish_reason": "stop"}
    item["token_ids"] = b64encode(struct.pack(f"<{end}i", *PROMPT, *sampled)).decode()
    item["mask"] = b64encode(bytes([0] * start + [1] * len(sampled))).decode()
    item["behavior_logprobs"] = b64encode(logprobs).decode()
    item["versions"] = [[start, len(sampled), version]]
    item["temperature"], item["reward"] = policy["sampling"]["temperature"], float(sampled[-1] % 2 == 0)
    return item | {"turns": [{"start": start, "end": end, "reward": item["reward"]}]}


def beat(session, worker, held):
    """Names the leases in progress in every heartbeat, which keeps them alive, until the run is over."""
    path = f"/v1/workers/{worker['worker_id']}/heartbeat"
    while call(session, "POST", path, {"lease_ids": held, "load": {}}).ok:
        time.sleep(worker["heartbeat_s"])


def serve(session, policies, worker):
    """Runs leases until the run is over (returns False) or the dataflow has forgotten this service (True)."""
    worker_id, held = worker["worker_id"], []
    threading.Thread(target=beat, args=(session, worker, held), daemon=True).start()
    while True:
        news = [call(session, "GET", f"/v1/policies/{p['name']}/versions").json() for p in policies]
        known = [sorted({reply["newest"], *reply["pinned"]}) for reply in news]
        served = [{"policy": p["name"], "versions": v} for p, v in zip(policies, known, strict=True)]
        body = {"worker_id": worker_id, "num_free": 8, "served": served, "wait_s": 0.5}
        reply = call(session, "POST", "/v1/leases", body)
        if reply.status_code == 404 or reply.json()["state"] != "running":
            return reply.status_code == 404
        held[:] = [lease["id"] for lease in reply.json()["leases"]]
        for lease in reply.json()["leases"]:
            uses = {s["policy"]: s["versions"][-1] for s in [*served, *lease["pinned"]]}
            made = [trajectory(policy, uses[policy["name"]]) for policy in policies]
            outcome = {"type": "episode", "trajectories": made, "score": made[0]["reward"]}
            results = [{"lease_id": lease["id"], "outcome": outcome}]
            call(session, "POST", "/v1/episodes", {"worker_id": worker_id, "results": results})


session = requests.Session()
session.url, session.headers["Authorization"] = sys.argv[1], f"Bearer {(sys.argv[2:] or [''])[0]}"
policies = [p for p in call(session, "GET", "/v1/run").json()["policies"] if p["is_trained"]]
join = {"name": "scripted", "hosts": [p["name"] for p in policies], "engine": "scripted", "num_slots": 8}
while serve(session, policies, call(session, "POST", "/v1/workers", join | {"fingerprints": {}}).json()):
    pass
