"""A trainer in plain PyTorch that uses only the protocol in docs/protocol, and nothing from AstraFlow.

It trains a Hugging Face model with PPO's clipped objective. Versions are chunk files in a folder that all
services can read; checkpoints hold model, optimizer, and step.
Usage: python plain_trainer.py URL POLICY MODEL_DIR CHECKPOINTS (the run's token, if any, in $ASTRAFLOW_TOKEN)
"""

import os
import struct
import sys
import time
from base64 import b64decode
from pathlib import Path

import requests
import torch
import xxhash
from transformers import AutoModelForCausalLM

LR, WARMUP_STEPS, MAX_GRAD_NORM, CLIP, MINIBATCHES, CHECKPOINT_EVERY = 7e-4, 10, 0.5, 0.2, 2, 2
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
url, policy, model_dir = sys.argv[1], sys.argv[2], Path(sys.argv[3])
checkpoint, chunks = Path(sys.argv[4]) / "plain.pt", Path(sys.argv[4]).resolve() / "chunks"
http = requests.Session()
http.headers["Authorization"] = f"Bearer {os.environ.get('ASTRAFLOW_TOKEN', '')}"


def call(method, path, body=None):
    """Sends and receives JSON. Retries after a lost connection, an unreadable answer, and 503. Exits when the
    run is over."""
    for attempt in range(60):
        try:
            reply = http.request(method, f"{url}/v1/policies/{policy}/{path}", json=body, timeout=150)
            if reply.status_code < 500:
                answer = reply.json() if reply.content else {}
                break
        except requests.RequestException:  # also raised for a body that isn't JSON
            pass
        time.sleep(min(2.0, 0.05 * 2**attempt))
    else:
        raise SystemExit(f"{url} does not answer")
    if answer.get("code") == "finished":
        raise SystemExit(0)
    if reply.status_code >= 400:  # usually `fenced`: another trainer has the policy now
        raise SystemExit(f"{path}: {answer}")
    return answer


def put(data):
    """Writes a chunk file, named by its content, atomically."""
    name = xxhash.xxh3_128_hexdigest(data)
    if not (chunks / name).exists():
        (chunks / f"{name}.part").write_bytes(data)
        os.replace(chunks / f"{name}.part", chunks / name)
    return [name, len(data)]


def publish(epoch, version, step):
    """Writes a version in full, announces it, and deletes chunks that nobody needs anymore."""
    tensors, data = [], bytearray()
    for name, value in model.named_parameters():
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 64)
        info = {"name": name, "shape": list(value.shape), "dtype": NAMES[value.dtype]}
        tensors.append(info | {"offset": len(data), "num_bytes": len(raw)})
        data += raw
    files = [{"name": p.name, "chunk": put(p.read_bytes())} for p in model_files]
    whole = chunk_of[version] = put(bytes(data))
    manifest = {"policy": policy, "version": version, "kind": "full", "tensors": tensors, "chunks": [whole]}
    segments = [data[i : i + 2**19] for i in range(0, len(data), 2**19)]
    digest = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, segments)))
    manifest |= {"digest": digest, "files": files}
    manifest |= {"sources": [{"kind": "file", "url": str(chunks)}]}
    manifest |= {"num_bytes": whole[1] + sum(file["chunk"][1] for file in files)}
    needed = call("POST", "versions", {"epoch": epoch, "step": step, "manifest": manifest})["needed"]
    for old in [v for v in chunk_of if v not in needed]:
        if (gone := chunk_of.pop(old)) not in chunk_of.values():
            (chunks / gone[0]).unlink(missing_ok=True)


def loss_of(samples):
    """Returns the clipped surrogate of some samples, summed over their trained tokens. Columns are base64."""
    decoded = []
    for sample in samples:
        item = sample["trajectory"]
        ids, old = b64decode(item["token_ids"]), b64decode(item["behavior_logprobs"])
        num = len(ids) // 4
        advantages = torch.zeros(num)
        for start, end, value in sample["advantages"]:
            advantages[start:end] = value
        columns = (torch.tensor(struct.unpack(f"<{num}i", ids)), torch.tensor(struct.unpack(f"<{num}f", old)))
        decoded.append((*columns, torch.tensor(list(b64decode(item["mask"])), dtype=torch.float), advantages))
    padded = [
        torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*decoded, strict=True)
    ]
    ids, old, mask, advantages = padded
    logits = model(input_ids=ids).logits[:, :-1] / samples[0]["trajectory"]["temperature"]
    new = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(new - old[:, 1:])
    gains = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, 1:])
    return -(gains * mask[:, 1:]).sum()


def train(batch):
    """Makes the optimizer steps of one batch; each loss is divided by its minibatch's number of tokens."""
    total = 0.0
    optimizer.param_groups[0]["lr"] = LR * min(1.0, (batch["step"] + 1) / WARMUP_STEPS)
    for idx in range(MINIBATCHES):
        loss = loss_of(batch["samples"][idx::MINIBATCHES])
        loss = loss * MINIBATCHES / batch["totals"]["num_trained_tokens"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        total += loss.item() / MINIBATCHES
    return total


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
chunks.mkdir(parents=True, exist_ok=True)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model_files = [p for p in sorted(model_dir.iterdir()) if p.suffix in {".json", ".txt", ".jinja"}]
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
durable, chunk_of = 0, {}
if checkpoint.exists():
    saved = torch.load(checkpoint)
    durable, chunk_of = saved["step"], saved["chunk_of"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

session = call("POST", "session", {"trainer_id": "plain", "durable_step": durable, "fingerprints": {}})
epoch, version = session["epoch"], session["next_version"]
publish(epoch, version, session["step"])
for step in range(session["step"], session["num_steps"]):
    batch = None
    while batch is None:
        answer = call("GET", f"batches/{step}?epoch={epoch}&wait_s=25")
        batch = answer["batch"]
        if batch is None and answer["state"] in {"finished", "failed"}:
            raise SystemExit(0)
    loss, version = train(batch), version + 1
    publish(epoch, version, step + 1)
    commit = {"epoch": epoch, "step": step, "version": version, "metrics": [["loss", loss, "mean"]]}
    call("POST", "commit", commit)
    if (step + 1) % CHECKPOINT_EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"step": step + 1, "chunk_of": chunk_of}, part := checkpoint.with_suffix(".part"))
        os.replace(part, checkpoint)
        call("POST", "release", {"epoch": epoch, "step": step + 1, "version": version})
