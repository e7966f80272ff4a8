// A rollout service in Node.js that knows nothing of AstraFlow but docs/protocol. It hosts
// the run's first trained policy, if that is Qwen3-shaped, in float32, with a tokenizer of words and characters, and
// scores what follows the last "=". Versions are fetched in full. No packages.
// Usage: node service.mjs URL [TOKEN]

import { setTimeout as sleep } from "node:timers/promises";
import { episode } from "./episode.mjs";
import { fetchVersion } from "./weights.mjs";

const [url, token = ""] = process.argv.slice(2);
const [SLOTS, KEPT] = [16, 8];
const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };

/** JSON both ways. Repeats after a lost connection, an answer that cannot be read, and 503. */
async function call(method, path, body) {
  for (let pause = 50; ; pause = Math.min(2000, 2 * pause)) {
    try {
      const sent = typeof body === "function" ? body() : body;
      const target = url + (typeof path === "function" ? path() : path);
      const reply = await fetch(target, { method, headers, body: sent && JSON.stringify(sent) });
      const text = await reply.text();
      if (reply.status < 500) return { status: reply.status, item: text ? JSON.parse(text) : {} };
    } catch (error) {
      console.error(`${method} ${url}: ${error}`);
    }
    await sleep(pause);
  }
}

const run = (await call("GET", "/v1/run")).item;
const policy = run.policies.find((known) => known.is_trained);
const evalTemperature = JSON.parse(run.recipe).eval?.temperature ?? 1;
const models = new Map(); // version -> {model, tokenizer}
const held = new Set(); // leases without a receipt
let [me, joining, newest, pinned, isLeaving, numTokens] = [null, null, -1, [], false, 0];

/** Registers; those who come meanwhile wait for the same answer. */
function join() {
  joining ??= (async () => {
    const request = { name: "node", hosts: [policy.name], engine: "node", num_slots: SLOTS, fingerprints: {} };
    const { status, item } = await call("POST", "/v1/workers", request);
    if (status !== 200) throw new Error(item.message);
    [me, joining] = [item, null];
  })();
  return joining;
}

/** A request under the present id; again under a new one if the dataflow does not know it any more. */
async function ask(path, body) {
  for (;;) {
    const id = me.worker_id;
    const { status, item } = await call("POST", path.replace("{id}", id), () => body(id));
    if (["finished", "failed"].includes(item.state)) process.exit(0);
    if (status < 400) return item;
    if (item.code !== "unknown_worker") throw new Error(item.message);
    if (me.worker_id === id) await join();
  }
}

/** Downloads and verifies a full version; only then is it served. */
async function install(manifest) {
  models.set(manifest.version, await fetchVersion(manifest, headers.Authorization));
  for (const version of [...models.keys()].slice(0, -KEPT)) pinned.includes(version) || models.delete(version);
  newest = manifest.version;
}

async function follow() {
  for (;;) {
    const known = () => `/v1/policies/${policy.name}/versions?after=${newest}&wait_s=25&pinned=${pinned}`;
    const { item } = await call("GET", known);
    if (["finished", "failed"].includes(item.state)) process.exit(0);
    pinned = item.pinned;
    const manifest = item.manifests.findLast((found) => found.kind === "full");
    try {
      if (manifest) await install(manifest);
    } catch (error) {
      console.error(`version ${manifest.version} cannot be had, ${newest} stays: ${error}`);
    }
    if (item.manifests.length && newest < item.newest) await sleep(200);
  }
}

/** What it can generate with now: the newest version, and those that evaluation needs. */
function served() {
  const versions = [...models.keys()].filter((version) => version === newest || pinned.includes(version));
  return [{ policy: policy.name, versions: versions.sort((a, b) => a - b) }];
}

async function beat() {
  for (;; await sleep(1000 * me.heartbeat_s)) {
    const load = { num_running: held.size, versions: served(), generated_tokens: numTokens };
    const reply = await ask("/v1/workers/{id}/heartbeat", () => ({ lease_ids: [...held], load }));
    isLeaving ||= reply.is_draining;
    if (isLeaving) await goodbye();
  }
}

/** The result of a lease: evaluation runs with exactly its version, or fails. */
function outcome(lease) {
  const version = lease.pinned[0]?.versions[0] ?? newest;
  const served = models.get(version);
  if (!served) return { type: "failure", error_class: "NotServed", message: `version ${version} is not here` };
  const temperature = lease.kind === "eval" ? evalTemperature : policy.sampling.temperature;
  const made = episode(lease, served, { policy, version, temperature });
  numTokens += made.numTokens;
  return made.outcome;
}

async function goodbye() {
  isLeaving = true;
  if (held.size) return; // the loop below sends what it holds first
  await call("POST", `/v1/workers/${me.worker_id}/drain`);
  process.exit(0);
}
process.on("SIGTERM", () => {
  setTimeout(() => process.exit(1), 10_000); // nobody may be there to say goodbye to
  goodbye();
});

await join();
follow();
beat();
while (newest < 0) await sleep(50);
while (!isLeaving) {
  const asks = (id) => ({ worker_id: id, num_free: SLOTS, served: served(), wait_s: 25, held: [...held] });
  const { leases } = await ask("/v1/leases", asks);
  for (const lease of leases) held.add(lease.id);
  const results = [];
  for (const lease of leases) {
    results.push({ lease_id: lease.id, outcome: outcome(lease) });
    await sleep(0); // heartbeats and versions come in between
  }
  if (results.length) await ask("/v1/episodes", (id) => ({ worker_id: id, results }));
  held.clear();
}
await goodbye();
