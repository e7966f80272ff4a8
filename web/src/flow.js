// The dataflow picture: who works, what passes between them, and which version is where; now, or at any past time.
import { useEffect, useMemo, useState } from "preact/hooks";
import { ago, clock, html, num, query, useAnswer } from "./base.js";

const cut = (text, most = 26) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// Icons from one set: strokes in a square of 16.
const ICONS = {
  rollout: "M2 4h12v8H2z M5 7l2 1.500-2 1.500 M9 10h2.500",
  dataflow: "M8 2c3.500 0 6 .9 6 2s-2.500 2-6 2-6-.9-6-2 2.500-2 6-2z M2 4v8c0 1.100 2.500 2 6 2s6-.9 6-2V4 M2 8c0 1.100 2.500 2 6 2s6-.9 6-2",
  trainer: "M2 13l4-5 3 3 5-8 M10.500 3H14v3.500",
};

function Node({ x, y, node }) {
  return html`<g class=${`node ${node.state} ${node.isBusy ? "busy" : ""}`} transform=${`translate(${x} ${y})`}>
    <rect width="200" height="62" rx="10" />
    <path class="icon" d=${ICONS[node.kind]} transform="translate(10 9)" />
    <text x="34" y="22" class="title">${cut(node.title, 20)}</text>
    ${node.mark && html`<text x="192" y="22" class="mark" text-anchor="end">${node.mark}</text>`}
    ${node.lines.slice(0, 2).map((line, idx) => html`<text x="10" y=${40 + idx * 15}>${cut(line)}</text>`)}
    <title>${[node.title, node.mark, ...node.lines].filter(Boolean).join("\n")}</title>
  </g>`;
}

// An edge is as wide as its share of the tokens; dots are versions on their way back.
function Edge({ from, to, share, isLive, isBack }) {
  const [x1, y1] = from;
  const [x2, y2] = to;
  const path = `M${x1} ${y1} C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
  return html`<path class=${`edge ${isLive ? "live" : ""}`} d=${path} stroke-width=${1.5 + 5 * share} />
    ${isBack && !isCalm() && html`<circle class="version" r="4"><animateMotion path=${path} dur="1.6s" repeatCount="indefinite" keyPoints="1;0" keyTimes="0;1" calcMode="linear" /></circle>`}`;
}

export function Flow({ workers, trainers, hub }) {
  const shown = workers.slice(0, 8);
  if (workers.length > 8) shown.push({ kind: "rollout", title: `${workers.length - 8} more`, lines: ["in the list of processes"], state: "idle" });
  const rows = Math.max(1, shown.length, trainers.length);
  const height = rows * 74 + 6;
  const at = (idx, count) => (height - count * 74) / 2 + idx * 74 + 6;
  const total = Math.max(1, ...workers.map((worker) => worker.tokens ?? 0));
  const mid = height / 2;
  return html`<svg class="picture" viewBox=${`0 0 760 ${height}`} role="img" aria-label="services of the run and what passes between them">
    ${shown.map((node, idx) => html`<${Edge} key=${node.title} from=${[202, at(idx, shown.length) + 31]} to=${[280, mid]} share=${(node.tokens ?? 0) / total} isLive=${node.isBusy} isBack=${node.isLoading} />`)}
    ${trainers.map((node, idx) => html`<${Edge} key=${node.title} from=${[480, mid]} to=${[558, at(idx, trainers.length) + 31]} share=${node.share ?? 0.4} isLive=${node.isBusy} isBack=${node.isPublishing} />`)}
    <${Node} x="280" y=${mid - 31} node=${hub} />
    ${shown.map((node, idx) => html`<${Node} x="2" y=${at(idx, shown.length)} node=${node} />`)}
    ${trainers.map((node, idx) => html`<${Node} x="558" y=${at(idx, trainers.length)} node=${node} />`)}
  </svg>`;
}

// --- now ---

const restarted = (service) => (service?.restarts ? `restarted ${service.restarts}×` : "");

export function liveFlow(status) {
  const flow = status.dataflow;
  const services = new Map((status.services ?? []).map((service) => [service.name, service]));
  const bad = (name) => {
    const service = services.get(name);
    return service && (service.trouble || service.is_silent || !["running", "ended", ""].includes(service.state));
  };
  const now = flow?.now_s ?? 0;
  const known = (flow?.workers ?? []).map((worker) => {
    const silent = now - worker.last_seen_s;
    const versions = worker.load.versions.map((entry) => `${entry.policy} v${entry.versions.at(-1) ?? "–"}`).join(", ");
    const { num_running, num_slots, max_slots } = worker.load;
    const ceiling = num_slots < max_slots ? ` of ${max_slots}` : "";
    const load = `${num(Math.round(worker.load.tokens_per_s))} tokens/s · ${num_running}/${num_slots || "?"}${ceiling}`;
    return {
      kind: "rollout", title: worker.name, tokens: worker.load.tokens_per_s, isBusy: worker.load.num_running > 0,
      isLoading: (worker.load.transfers ?? []).length > 0,
      mark: worker.is_set_aside ? "set aside" : worker.is_draining ? "leaving" : restarted(services.get(worker.name)),
      lines: [silent > 5 ? `silent for ${ago(silent)}` : load, versions || "no version yet"],
      state: bad(worker.name) || silent > 5 ? "bad" : worker.is_set_aside || worker.is_draining ? "warn" : "good",
    };
  });
  const names = new Set(known.map(({ title }) => title));
  const missing = [...services.values()].filter(({ name }) => name.startsWith("rollout-") && !names.has(name))
    .map((service) => ({ kind: "rollout", title: service.name, mark: restarted(service), lines: [service.state || "starting"], state: bad(service.name) ? "bad" : "idle" }));
  const trainers = (flow?.policies ?? []).map((policy) => ({
    kind: "trainer", title: `trainer ${policy.name}`, mark: restarted(services.get(`trainer-${policy.name}`)),
    lines: [`step ${policy.step}/${policy.num_steps} · v${policy.newest_version}`, `${policy.num_ready_groups}/${policy.groups_per_batch} groups ready · ${policy.num_tickets}/${policy.max_tickets} tickets`],
    state: bad(`trainer-${policy.name}`) ? "bad" : "good", isBusy: true, isPublishing: true,
  }));
  const drawn = (flow?.policies ?? []).reduce((sum, policy) => sum + policy.fates.drawn, 0);
  const hub = { kind: "dataflow", title: "dataflow", mark: restarted(services.get("dataflow")), state: flow && !bad("dataflow") ? "good" : "bad", lines: flow ? [flow.state, `${num(drawn)} groups drawn`] : ["no answer"] };
  return { workers: [...known, ...missing], trainers, hub };
}

// --- at a past time ---

const WORDS = { generate: "generating", load: "loading weights", train: "training", publish: "publishing", "wait:dataflow": "waiting for a batch", "wait:publisher": "waiting for the publisher" };

function pastFlow(data, at, rows) {
  const doing = (lane) => lane.spans.filter(([, start, stop]) => start <= at && stop >= at).map(([kind]) => kind);
  const seen = [...rows].filter((row) => row.at_s <= at);
  const workers = [];
  const trainers = [];
  for (const lane of data.lanes) {
    const kinds = doing(lane);
    const words = kinds.map((kind) => WORDS[kind] ?? kind).join(", ") || "idle";
    if (lane.name.startsWith("trainer")) {
      const policy = lane.name.slice(8);
      const step = seen.findLast((row) => row.kind === "step" && row.policy === policy);
      trainers.push({ kind: "trainer", title: lane.name, lines: [words, step ? `step ${step.step} · v${step.version} · reward ${num(step.reward_mean)}` : "before the first step"],
        state: kinds.includes("train") ? "good" : "idle", isBusy: kinds.includes("train"), isPublishing: kinds.includes("publish") });
    } else {
      workers.push({ kind: "rollout", title: lane.name, lines: [words], tokens: kinds.includes("generate") ? 1 : 0, isBusy: kinds.includes("generate"), isLoading: kinds.includes("load"), state: kinds.includes("generate") ? "good" : "idle" });
    }
  }
  return { workers, trainers, hub: { kind: "dataflow", title: "dataflow", state: "good", lines: [clock(at), `${num(seen.filter((row) => row.kind === "step").length)} steps done`] } };
}

export function Replay({ run, rows }) {
  const steps = useMemo(() => rows.filter((row) => row.kind === "step"), [rows]);
  const begin = rows[0]?.at_s ?? 0;
  const end = rows.at(-1)?.at_s ?? 0;
  const [place, move] = useState(0.5);
  const [isPlaying, play] = useState(false);
  const at = begin + place * (end - begin);
  const part = Math.floor(place * 20);
  const width = (end - begin) / 20;
  const span = query({ from: begin + part * width, to: begin + (part + 1) * width });
  const { data } = useAnswer(end > begin ? `api/runs/${encodeURIComponent(run)}/timeline?${span}` : "");
  const [kept, keep] = useState(null);
  useEffect(() => data && keep(data), [data]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const timer = setInterval(() => move((old) => (old >= 1 ? 0 : Math.min(1, old + 0.004))), 100);
    return () => clearInterval(timer);
  }, [isPlaying]);
  if (steps.length === 0) return null;
  const flow = kept ? pastFlow(kept, at, rows) : { workers: [], trainers: [], hub: { kind: "dataflow", title: "dataflow", lines: ["reading the timeline"], state: "idle" } };
  return html`<div class="replay"><${Flow} ...${flow} /></div>
    <div class="bar"><button onClick=${() => play(!isPlaying)}>${isPlaying ? "Pause" : "Play"}</button>
      <input class="scrub" type="range" min="0" max="1" step="0.001" value=${place} aria-label="time of the picture" onInput=${(event) => move(Number(event.target.value))} />
      <span class="muted">${clock(at)}, ${ago(at - begin)} after the first row</span></div>`;
}
