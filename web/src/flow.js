// The dataflow picture: who works, what passes between them, and which version is where; now, or at any past time.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ago, clock, html, num, query, useAnswer, useWidth } from "./base.js";
import { Icon } from "./icons.js";

const HEIGHT = 70;
const GAP = 10;
const NARROW = 640;
const MOST = 7;
const MOST_SQUARES = 256;
const SQUARE = 13;

function Node({ box, node }) {
  const style = { left: `${box.x}px`, top: `${box.y}px`, width: `${box.w}px`, height: `${box.h}px` };
  return html`<div class=${`node ${node.state}`} style=${style} title=${[node.title, node.mark, ...node.lines].filter(Boolean).join("\n")}>
    <div class="title"><${Icon} name=${node.squares ? "fleet" : node.kind} /><span>${node.title}</span>${node.mark && html`<b class="mark">${node.mark}</b>`}</div>
    ${node.lines.slice(0, 2).map((line) => html`<p>${line}</p>`)}
    ${node.squares && html`<div class="squares">${node.squares.slice(0, MOST_SQUARES).map((each) => html`<i class=${each.state} title=${`${each.title}: ${each.lines[0]}`}></i>`)}</div>`}
  </div>`;
}

// An edge is as wide as its share of the tokens. A dot goes along it once for each version that passes.
function pathOf(from, to, isNarrow) {
  const [x1, y1] = isNarrow ? [from.x + from.w / 2, from.y + from.h] : [from.x + from.w, from.y + from.h / 2];
  const [x2, y2] = isNarrow ? [to.x + to.w / 2, to.y] : [to.x, to.y + to.h / 2];
  const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2];
  return isNarrow ? `M${x1} ${y1} C${x1} ${my} ${x2} ${my} ${x2} ${y2}` : `M${x1} ${y1} C${mx} ${y1} ${mx} ${y2} ${x2} ${y2}`;
}

// Where each node lies, in pixels: in three columns, or below each other on a narrow page.
function placed(width, workers, trainers) {
  const isNarrow = width < NARROW;
  const w = isNarrow ? width : Math.min(290, (width - 150) / 3);
  const tall = (node, wide) => (node.squares ? HEIGHT + SQUARE * Math.ceil(Math.min(MOST_SQUARES, node.squares.length) / Math.floor((wide - 26) / SQUARE)) : HEIGHT);
  if (!isNarrow) {
    const sizes = [workers, trainers].map((nodes) => nodes.reduce((sum, node) => sum + tall(node, w) + GAP, -GAP));
    const height = Math.max(HEIGHT, ...sizes);
    const column = (nodes, x, size) => {
      let y = (height - size) / 2;
      return nodes.map((node) => {
        const box = { x, y, w, h: tall(node, w) };
        y += box.h + GAP;
        return box;
      });
    };
    const hub = { x: (width - w) / 2, y: (height - HEIGHT) / 2, w, h: HEIGHT };
    return { isNarrow, height, hub, workers: column(workers, 0, sizes[0]), trainers: column(trainers, width - w, sizes[1]) };
  }
  let y = 0;
  const rows = (nodes) => {
    const columns = nodes.length > 1 && !nodes.some((node) => node.squares) ? 2 : 1;
    const wide = (w - (columns - 1) * GAP) / columns;
    const boxes = nodes.map((node, idx) => {
      const box = { x: (idx % columns) * (wide + GAP), y, w: wide, h: tall(node, wide) };
      if (idx % columns === columns - 1 || idx === nodes.length - 1) y += box.h + GAP;
      return box;
    });
    y += 3 * GAP;
    return boxes;
  };
  const above = rows(workers);
  const [hub] = rows([{}]);
  return { isNarrow, workers: above, hub, trainers: rows(trainers), height: y - 4 * GAP };
}

// Many services share one node, in which each is a square; those with trouble keep a node of their own.
function folded(workers) {
  if (workers.length <= MOST) return workers;
  const own = workers.filter((node) => node.state === "bad").slice(0, MOST - 1);
  const rest = workers.filter((node) => !own.includes(node));
  const numBusy = rest.filter((node) => node.isBusy).length;
  const tokens = rest.reduce((sum, node) => sum + (node.tokens ?? 0), 0);
  const isCounted = tokens > rest.length;
  const fleet = { kind: "rollout", title: `${num(rest.length)} ${own.length ? "other " : ""}rollout services`, squares: rest, tokens, isBusy: numBusy > 0, state: "good",
    lines: [`${num(numBusy)} generate${isCounted ? ` · ${num(Math.round(tokens))} tokens/s` : ""}`, `${num(rest.filter((node) => node.sent).length)} have a version`] };
  return [...own, fleet];
}

// A dot that carries a version along an edge. Versions may come faster than anybody looks, and a page that never rests
// takes a CPU from the run, so the dot rests for `restMs` in between.
function Dot({ path, sent, restMs }) {
  const last = useRef({ turn: 0, at: 0 });
  const now = Date.now();
  if (last.current.sent !== sent && now - last.current.at >= restMs) last.current = { sent, at: now, turn: last.current.turn + 1 };
  return html`<i key=${last.current.turn} class="version" style=${{ offsetPath: `path("${path}")` }}></i>`;
}

export function Flow({ workers, trainers, hub, restMs = 10_000 }) {
  const [ref, width] = useWidth();
  const shown = folded(workers);
  const at = placed(width, shown, trainers);
  const total = Math.max(1, ...shown.map((node) => node.tokens ?? 0));
  const edges = width === 0 ? [] : [
    ...shown.map((node, idx) => ({ node, path: pathOf(at.workers[idx], at.hub, at.isNarrow), share: (node.tokens ?? 0) / total })),
    ...trainers.map((node, idx) => ({ node, path: pathOf(at.hub, at.trainers[idx], at.isNarrow), share: node.share ?? 0.4 })),
  ];
  return html`<div ref=${ref} class="flow" style=${{ height: `${at.height}px` }} role="group" aria-label="services of the run and what passes between them">
    ${width > 0 && html`<svg class="edges" width=${width} height=${at.height} aria-hidden="true">${edges.map(({ node, path, share }) => html`<path key=${node.title} class=${`edge ${node.isBusy ? "live" : ""}`} d=${path} stroke-width=${1.5 + 4 * share} />`)}</svg>
    ${edges.map(({ node, path }) => node.sent != null && html`<${Dot} key=${node.title} path=${path} sent=${node.sent} restMs=${restMs} />`)}
    <${Node} box=${at.hub} node=${hub} />
    ${shown.map((node, idx) => html`<${Node} key=${node.title} box=${at.workers[idx]} node=${node} />`)}
    ${trainers.map((node, idx) => html`<${Node} key=${node.title} box=${at.trainers[idx]} node=${node} />`)}`}
  </div>`;
}

// --- now ---

const STARTING = ["", "waiting"];
const restarted = (service) => (service?.restarts ? `restarted ${service.restarts}×` : "");

export function liveFlow(status) {
  const flow = status.dataflow;
  const services = new Map((status.services ?? []).map((service) => [service.name, service]));
  const bad = (name) => {
    const service = services.get(name);
    return service && (service.trouble || service.is_silent || !["running", "ended", "waiting", ""].includes(service.state));
  };
  const now = flow?.now_s ?? 0;
  const known = (flow?.workers ?? []).map((worker) => {
    const silent = now - worker.last_seen_s;
    const held = worker.load.versions.map((entry) => `${entry.policy} v${entry.versions.at(-1) ?? "–"}`).join(", ");
    const { num_running, num_slots, max_slots } = worker.load;
    const ceiling = num_slots < max_slots ? ` of ${max_slots}` : "";
    const load = `${num(Math.round(worker.load.tokens_per_s))} tokens/s · ${num_running}/${num_slots || "?"}${ceiling}`;
    return {
      kind: "rollout", title: worker.name, tokens: worker.load.tokens_per_s, isBusy: worker.load.num_running > 0, sent: held || null,
      mark: worker.is_set_aside ? "set aside" : worker.is_draining ? "leaving" : restarted(services.get(worker.name)),
      lines: [silent > 5 ? `silent for ${ago(silent)}` : load, held || "no version yet"],
      state: bad(worker.name) || silent > 5 ? "bad" : worker.is_set_aside || worker.is_draining ? "warn" : "good",
    };
  });
  const names = new Set(known.map(({ title }) => title));
  const missing = [...services.values()].filter(({ name }) => name.startsWith("rollout-") && !names.has(name))
    .map((service) => ({ kind: "rollout", title: service.name, mark: restarted(service), lines: [STARTING.includes(service.state) ? "starting" : service.state], state: bad(service.name) ? "bad" : "idle" }));
  const trainers = (flow?.policies ?? []).map((policy) => ({
    kind: "trainer", title: `trainer ${policy.name}`, mark: restarted(services.get(`trainer-${policy.name}`)),
    lines: [`step ${policy.step}/${policy.num_steps} · v${policy.newest_version}`, `${policy.num_ready_groups}/${policy.groups_per_batch} groups ready · ${policy.num_tickets}/${policy.max_tickets} tickets`],
    state: bad(`trainer-${policy.name}`) ? "bad" : "good", isBusy: true, sent: policy.newest_version,
  }));
  const isStarting = STARTING.includes(services.get("dataflow")?.state ?? "");
  const drawn = (flow?.policies ?? []).reduce((sum, policy) => sum + policy.fates.drawn, 0);
  const hub = { kind: "dataflow", title: "dataflow", mark: restarted(services.get("dataflow")), state: flow && !bad("dataflow") ? "good" : isStarting ? "idle" : "bad",
    lines: flow ? [flow.state, `${num(drawn)} groups drawn`] : [isStarting ? "starting" : "no answer"] };
  return { workers: [...known, ...missing], trainers, hub };
}

// --- at a past time ---

const WORDS = { generate: "generating", load: "loading weights", train: "training", publish: "publishing", "wait:dataflow": "waiting for a batch", "wait:publisher": "waiting for the publisher" };

// `names` has every service of the run, so that none leaves the picture while it does nothing.
function pastFlow(data, at, rows, names) {
  const seen = rows.filter((row) => row.at_s <= at);
  const lanes = new Map(data.lanes.map((lane) => [lane.name, lane.spans]));
  const nodes = [...names].sort().map((name) => {
    const spans = (lanes.get(name) ?? []).filter(([, start]) => start <= at);
    const kinds = spans.filter(([, , stop]) => stop >= at).map(([kind]) => kind);
    return { name, spans, kinds, words: kinds.map((kind) => WORDS[kind] ?? kind).join(", ") || (data.isEmpty ? "reading the time line" : "idle") };
  });
  const trainers = nodes.filter(({ name }) => name.startsWith("trainer")).map(({ name, kinds, words }) => {
    const step = seen.findLast((row) => row.kind === "step" && row.policy === name.slice(8));
    return { kind: "trainer", title: name, lines: [words, step ? `step ${step.step} · v${step.version} · reward ${num(step.reward_mean)}` : "before the first step"],
      state: kinds.includes("train") ? "good" : "idle", isBusy: kinds.includes("train"), sent: step?.version };
  });
  const workers = nodes.filter(({ name }) => !name.startsWith("trainer")).map(({ name, spans, kinds, words }) => {
    const isBusy = kinds.includes("generate");
    return { kind: "rollout", title: name, lines: [words], tokens: isBusy ? 1 : 0, isBusy, state: isBusy ? "good" : "idle",
      sent: spans.filter(([kind]) => kind === "load").length || null };
  });
  const numSteps = seen.filter((row) => row.kind === "step").length;
  return { workers, trainers, hub: { kind: "dataflow", title: "dataflow", state: "good", lines: [clock(at), `${num(numSteps)} step${numSteps === 1 ? "" : "s"} done`] } };
}

// The names that the time line gives to the processes of a run.
const lanesOf = (services) => services.map(({ name }) => name).filter((name) => /^(rollout|trainer)-/.test(name)).map((name) => name.replace(/^trainer-/, "trainer "));

export function Replay({ run, rows, services }) {
  const steps = useMemo(() => rows.filter((row) => row.kind === "step"), [rows]);
  // The clock may have been set back during the run, so the first row needn't be the earliest.
  const [begin, end] = useMemo(() => rows.reduce(([low, high], { at_s }) => [Math.min(low, at_s), Math.max(high, at_s)], [Infinity, -Infinity]), [rows]);
  const [place, move] = useState(0.5);
  const [isPlaying, play] = useState(false);
  const at = begin + place * (end - begin);
  const part = Math.floor(place * 20);
  const width = (end - begin) / 20;
  const span = query({ from: begin + part * width, to: begin + (part + 1) * width });
  const { data } = useAnswer(`api/runs/${encodeURIComponent(run)}/timeline?${end > begin ? span : ""}`);
  const [kept, keep] = useState({ lanes: [], isEmpty: true });
  const names = useRef(null);
  names.current ??= new Set(lanesOf(services));
  kept.lanes.forEach(({ name }) => names.current.add(name));
  useEffect(() => data && keep(data), [data]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const timer = setInterval(() => move((old) => (old >= 1 ? 0 : Math.min(1, old + 0.004))), 100);
    return () => clearInterval(timer);
  }, [isPlaying]);
  if (steps.length === 0) return null;
  const flow = pastFlow(kept, at, rows, names.current);
  return html`<${Flow} ...${flow} restMs=${0} />
    <div class="bar"><button onClick=${() => play(!isPlaying)}><${Icon} name=${isPlaying ? "pause" : "play"} />${isPlaying ? "Pause" : "Play"}</button>
      <input class="scrub" type="range" min="0" max="1" step="0.001" value=${place} aria-label="time of the picture" aria-valuetext=${clock(at)} onInput=${(event) => move(Number(event.target.value))} />
      <span class="muted n">${ago(at - begin)} of ${ago(end - begin)} · ${clock(at)}</span></div>`;
}
