// Weights, and the time line.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { Events } from "./events.js";
import { bytes, clock, download, html, link, num, Problem, query, Skeleton, useAnswer, useWidth } from "./base.js";

// --- weights ---

const onItsWay = (t) =>
  `${t.policy} ${t.version}: ${bytes(t.arrived_bytes)} of ${bytes(t.num_bytes)} in ${num(t.age_s)} s${t.problem ? ` (${t.problem})` : ""}`;

// The curves of published versions, and of how long services took to load them.
function WeightCurves({ versions, loads }) {
  const policies = [...new Set(versions.map(({ policy }) => policy))];
  const sizeOf = (version) => (version.kind === "delta" ? version.fetched_bytes : version.shortcut_bytes || null);
  const series = (pick) => policies.map((policy) => {
    const own = versions.filter((version) => version.policy === policy);
    return { label: policy, x: own.map((v) => v.version), y: own.map(pick) };
  });
  const begin = loads[0]?.at_s ?? 0;
  const loading = [...new Set(loads.map(({ worker }) => worker))].map((worker) => {
    const own = loads.filter((load) => load.worker === worker);
    return { label: worker, x: own.map((load) => load.at_s - begin), y: own.map((load) => load.seconds) };
  });
  const atOf = new Map(versions.map((v) => [`${v.policy} ${v.version}`, v.at_s]));
  const since = (v) => {
    const before = atOf.get(`${v.policy} ${v.version - 1}`);
    return before == null ? null : v.at_s - before;
  };
  return html`<div class="charts">
    ${versions.some((v) => sizeOf(v) != null) && html`<${Chart} title="Bytes of the delta" xLabel="version" series=${series(sizeOf)} />
    <${Chart} title="Delta as a share of the full version" xLabel="version" series=${series((v) => (sizeOf(v) == null || !v.full_bytes ? null : sizeOf(v) / v.full_bytes))} />`}
    <${Chart} title="Seconds since the version before" xLabel="version" series=${series((v) => since(v))} />
    <${Chart} title="Seconds to fetch and load a version" xLabel="seconds" series=${loading} /></div>`;
}

const NEWEST = 20;

export function WeightsPage({ run }) {
  const [isAll, showAll] = useState(false);
  const base = `api/runs/${encodeURIComponent(run)}`;
  const { data: versions, error } = useAnswer(`${base}/versions`, 5000);
  const { data: now } = useAnswer(`${base}/now`, 2000);
  const { data: loads } = useAnswer(`${base}/loads`, 5000);
  const curves = useMemo(() => versions && loads && html`<${WeightCurves} versions=${versions} loads=${loads} />`, [versions, loads]);
  // All at once, so that nothing moves when a part arrives.
  if (!curves || !now) return html`<${Problem} error=${error} />${!error && html`<${Skeleton} />`}`;
  const holders = now.status.dataflow?.workers ?? [];
  return html`<${Problem} error=${error} />${curves}
    <section><h2>Who holds what</h2>
    ${holders.length === 0 ? html`<p class="empty"><b>No service is connected</b>While the run goes on, this is a list of its rollout services.</p>` : html`<div class="scroll" tabindex="0" role="group" aria-label="services"><table><thead><tr><th>service</th><th>versions</th><th>on their way</th></tr></thead><tbody>
      ${holders.map((worker) => html`<tr key=${worker.id}><td>${worker.name}</td><td>${worker.load.versions.map((v) => `${v.policy}: ${v.versions.join(", ")}`).join("; ")}</td>
        <td>${(worker.load.transfers ?? []).map(onItsWay).join("; ") || "–"}</td></tr>`)}</tbody></table></div>`}</section>
    <section><h2>Versions</h2><div class="scroll" tabindex="0" role="group" aria-label="versions"><table><thead><tr><th>policy</th><th class="n">version</th><th class="n">steps</th><th>published</th><th>kind</th>
      <th class="n">to fetch</th><th class="n">delta next to it</th><th class="n">in full</th></tr></thead><tbody>
      ${versions.slice(isAll ? -200 : -NEWEST).reverse().map((v) => html`<tr key=${`${v.policy} ${v.version}`}><td>${v.policy}</td><td class="n">${v.version}</td><td class="n">${v.step}</td><td>${clock(v.at_s)}</td>
        <td>${v.kind}${v.kind === "delta" ? ` to ${v.base}` : ""}</td><td class="n">${bytes(v.fetched_bytes)}</td><td class="n">${v.shortcut_bytes ? bytes(v.shortcut_bytes) : "–"}</td><td class="n">${bytes(v.full_bytes)}</td></tr>`)}
      </tbody></table></div>
      ${versions.length > NEWEST && html`<button onClick=${() => showAll(!isAll)}>${isAll ? "Fewer" : `The newest ${Math.min(200, versions.length)} versions`}</button>`}</section>`;
}

// --- time line ---

// Events of each step.
const QUIET = ["take", "commit", "publish"];
const LANE = 26;
const NAMES = 130;
const SLOT = 14;
const MAX_SLOTS = 64;

export function TimelinePage({ run }) {
  const base = `api/runs/${encodeURIComponent(run)}`;
  const [range, setRange] = useState(null);
  const { data, error } = useAnswer(`${base}/timeline?${range ? query({ from: range[0], to: range[1] }) : ""}`, range ? 0 : 5000);
  const [kept, keep] = useState(null);
  const [problem, setProblem] = useState(null);
  const [isEvery, showEvery] = useState(false);
  useEffect(() => data && keep(data), [data]);
  const happenings = useMemo(() => [...(kept?.happenings ?? [])].reverse().filter(({ kind }) => isEvery || !QUIET.includes(kind)), [kept, isEvery]);
  if (!kept) return html`<${Problem} error=${error} />${!error && html`<${Skeleton} />`}`;
  const [begin, end] = range ?? [kept.begin_s, Math.max(kept.end_s, kept.begin_s + 1)];
  const width = end - begin;
  const move = (by) => setRange([begin + by * width, end + by * width]);
  const zoom = (by) => setRange([begin + (width * (1 - by)) / 2, end - (width * (1 - by)) / 2]);
  return html`<p class="facts">
      <button onClick=${() => zoom(0.5)}>Zoom in</button><button onClick=${() => zoom(2)}>Zoom out</button>
      <button onClick=${() => move(-0.5)}>Earlier</button><button onClick=${() => move(0.5)}>Later</button>
      <button onClick=${() => setRange(null)}>Whole run</button>
      <button onClick=${() => download(`${base}/trace`, `${run}.trace.json`).catch((e) => setProblem(e.message))}>Perfetto trace</button>
      <span>${clock(begin)} to ${clock(end)}, ${num(width)} s</span></p>
    <${Problem} error=${error ?? problem} />
    <${Lanes} data=${kept} begin=${begin} end=${end} setRange=${setRange} />
    <${Slots} run=${run} begin=${begin} end=${end} names=${kept.lanes.map((lane) => lane.name)} />
    <p class="scale"><span class="t span-generate">generate</span><span class="t span-train">train</span><span class="t span-wait">wait</span><span class="t span-other">load, publish</span></p>
    <${Events} happenings=${happenings} />
    <label class="check"><input type="checkbox" checked=${isEvery} onChange=${() => showEvery(!isEvery)} />Also what each step does: batches, commits, versions</label>`;
}

// What each slot of one service did: a bar per episode, which leads to it.
function Slots({ run, begin, end, names }) {
  const services = names.filter((name) => !name.startsWith("trainer"));
  const [chosen, choose] = useState("");
  const [box, full] = useWidth();
  const path = chosen ? `api/runs/${encodeURIComponent(run)}/slots?${query({ worker: chosen, from: begin, to: end })}` : "";
  const { data, error } = useAnswer(path);
  const width = Math.max(1, full - NAMES);
  const x = (atS) => NAMES + ((atS - begin) / (end - begin)) * width;
  const lanes = (data ?? []).slice(0, MAX_SLOTS);
  return html`<p class="facts"><label>slots of <select value=${chosen} onChange=${(event) => choose(event.target.value)}>
      <option value="">no service</option>${services.map((name) => html`<option>${name}</option>`)}</select></label>
      ${data && html`<span>${num(data.length)} ran at the same time${data.length > MAX_SLOTS ? `; ${MAX_SLOTS} are shown` : ""}</span>`}</p>
    <${Problem} error=${error} />
    <div ref=${box} class="lanes">${full > 0 && lanes.length > 0 && html`<svg width=${full} height=${lanes.length * SLOT + 4} role="group" aria-label=${`episodes in the slots of ${chosen}`}>
      ${lanes.map((lane, idx) => html`<g>${idx % 4 === 0 && html`<text x="4" y=${idx * SLOT + 11}>${lane.name}</text>`}
        ${lane.episodes.map(([id, start, stop, kind, reward, task]) => {
          const from = Math.max(NAMES, x(start));
          const to = Math.min(full, x(stop));
          if (to < from) return null;
          return html`<a href=${link("r", run, "episode", id)} aria-label=${`episode ${id}`}><rect class=${kind === "eval" ? "span-other" : reward > 0 ? "span-generate" : "span-wait"}
            x=${from} y=${idx * SLOT + 1} height=${SLOT - 2} width=${Math.max(1, to - from)}><title>${`${kind} ${task ?? ""}, reward ${num(reward)}, ${num(stop - start)} s`}</title></rect></a>`;
        })}</g>`)}
    </svg>`}</div>`;
}

const lookOf = (kind) => (kind.startsWith("wait") ? "wait" : ["generate", "train"].includes(kind) ? kind : "other");

function Lanes({ data, begin, end, setRange }) {
  const [box, full] = useWidth();
  const drag = useRef(null);
  const width = Math.max(1, full - NAMES);
  const x = (atS) => NAMES + ((atS - begin) / (end - begin)) * width;
  const height = data.lanes.length * LANE + 24;
  const atPointer = (event) => {
    const place = (event.clientX - event.currentTarget.getBoundingClientRect().left - NAMES) / width;
    return begin + Math.min(1, Math.max(0, place)) * (end - begin);
  };
  const release = (event) => {
    const first = drag.current;
    const last = atPointer(event);
    drag.current = null;
    if (first != null && Math.abs(last - first) > (end - begin) / 100) setRange([Math.min(first, last), Math.max(first, last)]);
  };
  const shown = data.lanes.map((lane) => ({ ...lane, spans: lane.spans.filter(([, start, stop]) => stop >= begin && start <= end) }));
  return html`<div ref=${box} class="lanes">${full > 0 && html`<svg width=${full} height=${height} role="img" aria-label="what each service did when; drag to zoom"
    onPointerDown=${(event) => { drag.current = atPointer(event); }} onPointerUp=${release}>
    ${shown.map((lane, idx) => html`<g><text x="4" y=${idx * LANE + 17}>${lane.name.length > 18 ? `${lane.name.slice(0, 17)}…` : lane.name}</text>
      ${lane.spans.map(([kind, start, stop]) => {
        const from = Math.max(NAMES, x(start));
        return html`<rect class=${`span-${lookOf(kind)}`} x=${from} y=${idx * LANE + 3} height=${LANE - 6} width=${Math.max(1, Math.min(full, x(stop)) - from)}><title>${kind}, ${num(stop - start)} s</title></rect>`;
      })}</g>`)}
    ${data.happenings.length > 0 && html`<text x="4" y=${height - 9}>events</text>`}
    ${data.happenings.filter((e) => e.at_s >= begin && e.at_s <= end).map((e) => html`<line class="event" x1=${x(e.at_s)} x2=${x(e.at_s)} y1=${height - 20} y2=${height - 6}><title>${e.kind} ${e.who} ${e.text}</title></line>`)}
  </svg>`}</div>`;
}
