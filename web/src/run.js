// The page of a run: who does what now, the curves, and what happened.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { ago, askJson, clock, html, num, Problem, useAnswer } from "./base.js";

const CHARTS = [
  ["reward", ["reward_mean"]],
  ["held-out score", []],
  ["loss", ["loss"]],
  ["entropy", ["entropy"]],
  ["KL", ["behavior_kl", "kl", "reference_kl"]],
  ["clipped share", ["clip_frac"]],
  ["gradient norm", ["grad_norm"]],
  ["engine and trainer: logprob gap", ["behavior_gap", "behavior_gap_max"]],
  ["staleness", ["staleness_mean", "staleness_max"]],
  ["length (sampled tokens)", ["episode/sampled_tokens"]],
  ["truncated share", ["episode/truncated_frac"]],
  ["discarded groups per step", ["num_discarded_groups"]],
  ["seconds per step", ["train_s", "batch_wait_s", "publish_s"]],
  ["seconds per episode", ["episode_s_mean", "episode_s_max"]],
];
const USED = new Set(CHARTS.flatMap(([, names]) => names));
const HIDDEN = new Set(["step", "version", "at_s", "id", "kind", "policy", "eval_set", "best_by"]);

// Rows of metrics.jsonl, each fetched once.
export function useMetrics(run, everyMs) {
  const [rows, setRows] = useState([]);
  const kept = useRef({ run, rows: [] });
  useEffect(() => {
    kept.current = { run, rows: [] };
    setRows([]);
    let isOver = false;
    let timer = 0;
    const again = async () => {
      try {
        const after = kept.current.rows.at(-1)?.id ?? 0;
        const found = document.hidden ? [] : await askJson(`api/runs/${encodeURIComponent(run)}/metrics?after=${after}`);
        if (isOver) return;
        if (found.length) {
          kept.current.rows = [...kept.current.rows, ...found];
          setRows(kept.current.rows);
        }
      } catch {
        // The overview shows what is wrong; the curves stay as they are.
      }
      if (everyMs && !isOver) timer = setTimeout(again, everyMs);
    };
    again();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [run, everyMs]);
  return rows;
}

export function seriesOf(rows, names, over = "step", prefix = "") {
  const policies = [...new Set(rows.map((row) => row.policy))];
  const start = rows[0]?.at_s ?? 0;
  return policies.flatMap((policy) =>
    names.map((name) => {
      const own = rows.filter((row) => row.kind === "step" && row.policy === policy && row[name] != null);
      const label = `${prefix}${policies.length > 1 || prefix ? `${policy} ` : ""}${name}`;
      return { label, x: own.map((row) => xOf(row, over, start)), y: own.map((row) => row[name]) };
    }),
  );
}

const xOf = (row, over, start) => (over === "seconds" ? row.at_s - start : over === "tokens" ? row.tokens_so_far : row.step);

export function evalSeries(rows, over = "step", prefix = "") {
  const evals = rows.filter((row) => row.kind === "eval" && row.score_mean != null);
  const start = rows[0]?.at_s ?? 0;
  const keys = [...new Set(evals.map((row) => `${row.policy} ${row.eval_set}`))];
  return keys.map((key) => {
    const own = evals.filter((row) => `${row.policy} ${row.eval_set}` === key);
    return {
      label: prefix + key,
      x: own.map((row) => xOf(row, over, start)),
      y: own.map((row) => row.score_mean),
      low: own.map((row) => row.score_mean - 2 * row.score_stderr),
      high: own.map((row) => row.score_mean + 2 * row.score_stderr),
    };
  });
}

function Node({ x, y, title, lines, state }) {
  return html`<g class=${`node ${state}`} transform=${`translate(${x} ${y})`}>
    <rect width="190" height="66" rx="8" />
    <text x="10" y="20" class="title">${title}</text>
    ${lines.slice(0, 2).map((line, idx) => html`<text x="10" y=${38 + idx * 16}>${line}</text>`)}
  </g>`;
}

const cut = (text, most = 28) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Services as nodes, with state, version and load; edges with what passes along them.
function Picture({ status }) {
  const flow = status.dataflow;
  const troubles = new Map((status.services ?? []).map((service) => [service.name, service]));
  const bad = (name) => {
    const service = troubles.get(name);
    return service && (service.trouble || service.is_silent || !["running", "ended", ""].includes(service.state));
  };
  const now = flow?.now_s ?? 0;
  const known = new Map((flow?.workers ?? []).map((worker) => [worker.name, worker]));
  const rollouts = [...troubles.keys()].filter((name) => name.startsWith("rollout-") && !known.has(name));
  const left = [
    ...[...known.values()].map((worker) => {
      const silent = now - worker.last_seen_s;
      const versions = worker.load.versions.map((entry) => `${entry.policy} v${entry.versions.at(-1) ?? "–"}`).join(", ");
      const { num_running, num_slots, max_slots } = worker.load;
      const ceiling = num_slots < max_slots ? ` of ${max_slots}` : "";
      const load = `${num_running}/${num_slots || "?"}${ceiling} slots, ${num(worker.load.tokens_per_s)} tokens/s`;
      const state = bad(worker.name) || silent > 5 ? "bad" : worker.is_set_aside || worker.is_draining ? "warn" : "good";
      const first = silent > 5 ? `silent for ${ago(silent)}` : worker.is_set_aside ? "set aside" : load;
      return { title: cut(worker.name, 22), lines: [cut(first), cut(versions)], state };
    }),
    ...rollouts.map((name) => ({ title: cut(name, 22), lines: [troubles.get(name).state], state: bad(name) ? "bad" : "idle" })),
  ];
  const shown = left.slice(0, 8);
  if (left.length > 8) shown.push({ title: `${left.length - 8} more`, lines: [], state: "idle" });
  const right = (flow?.policies ?? []).map((policy) => ({
    title: cut(`trainer ${policy.name}`, 22),
    lines: [`step ${policy.step}/${policy.num_steps}, version ${policy.newest_version}`, `${policy.num_ready_groups}/${policy.groups_per_batch} groups ready`],
    state: bad(`trainer-${policy.name}`) ? "bad" : "good",
    edge: `tickets ${policy.num_tickets}/${policy.max_tickets}`,
  }));
  const rows = Math.max(1, shown.length, right.length);
  const height = rows * 84 + 6;
  const centre = height / 2 - 33;
  const at = (idx, count) => (height - count * 84) / 2 + idx * 84 + 9;
  const line = (x1, y1, x2, y2) => html`<path class="edge" d=${`M${x1} ${y1} C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`} />`;
  return html`<svg class="picture" viewBox=${`0 0 720 ${height}`} role="img" aria-label="services of the run and what passes between them">
    ${shown.map((_, idx) => line(192, at(idx, shown.length) + 33, 265, height / 2))}
    ${right.map((_, idx) => line(455, height / 2, 528, at(idx, right.length) + 33))}
    <${Node} x="265" y=${centre} title="dataflow" state=${flow && !bad("dataflow") ? "good" : "bad"}
      lines=${flow ? [flow.state, cut(`${num(flow.policies.reduce((sum, p) => sum + p.fates.drawn, 0))} groups drawn`)] : ["no answer"]} />
    ${shown.map((node, idx) => html`<${Node} x="2" y=${at(idx, shown.length)} ...${node} />`)}
    ${right.map((node, idx) => html`<${Node} x="528" y=${at(idx, right.length)} ...${node} />`)}
    ${right.map((node, idx) => html`<text class="edge-text" x="493" y=${at(idx, right.length) + 28} text-anchor="middle">${node.edge}</text>`)}
  </svg>`;
}

function Services({ services }) {
  return html`<div class="scroll" tabindex="0" role="group" aria-label="table"><table>
    <caption class="sr">processes of the run</caption>
    <thead><tr><th>service</th><th>state</th><th>process</th><th>restarts</th><th>last sign of life</th><th>trouble</th></tr></thead>
    <tbody>${services.map(
      (s) => html`<tr class=${s.trouble || s.is_silent ? "bad" : ""}>
        <td>${s.name}</td><td>${s.state}</td><td>${s.pid}</td><td>${s.restarts}</td>
        <td>${s.silent_s == null ? "–" : ago(s.silent_s)}</td><td>${s.trouble || s.last_line}</td></tr>`,
    )}</tbody></table></div>`;
}

// What the watchdog found: why the run stands still or learns nothing, since when, and what to do.
function Alarms({ alarms, now }) {
  return alarms.map(
    (alarm) => html`<p key=${`${alarm.rule} ${alarm.subject}`} class="problem" role="alert" data-rule=${alarm.rule}>
      ${alarm.evidence}${alarm.advice && html`<span class="advice">${alarm.advice}</span>`}
      <small>${alarm.rule}, since ${ago(now - alarm.since_s)}</small></p>`,
  );
}

function Fates({ policies }) {
  const names = ["trained", "live", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"];
  return html`<div class="scroll" tabindex="0" role="group" aria-label="table"><table>
    <caption class="sr">fates of the groups</caption>
    <thead><tr><th>policy</th><th>drawn</th>${names.map((name) => html`<th>${name}</th>`)}<th>staleness bound</th></tr></thead>
    <tbody>${policies.map(
      (p) => html`<tr><td>${p.name ?? p.policy}</td><td>${num(p.fates.drawn)}</td>
        ${names.map((name) => html`<td>${num(p.fates[name])}</td>`)}<td>${num(p.staleness_bound)}</td></tr>`,
    )}</tbody></table></div>`;
}

// Title and lines of each chart that has any.
const curvesOf = (rows) => [
  ["held-out score (band: ± 2 standard errors)", evalSeries(rows)],
  ...CHARTS.map(([title, names]) => [title, seriesOf(rows, names).filter((line) => line.x.length)]).filter(
    ([, series]) => series.length,
  ),
];

export function RunPage({ run }) {
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}`, 2000);
  const rows = useMetrics(run, 4000);
  const curves = useMemo(() => curvesOf(rows), [rows]);
  if (!data) return html`<${Problem} error=${error} /><p class="loading">Loading…</p>`;
  const { status } = data;
  const others = [...new Set(rows.filter((r) => r.kind === "step").flatMap((r) => Object.keys(r)))]
    .filter((name) => !USED.has(name) && !HIDDEN.has(name));
  const [done, total] = (status.dataflow?.policies ?? []).reduce(([a, b], p) => [a + p.step, b + p.num_steps], [0, 0]);
  return html`
    <${Problem} error=${error} />
    <p class="facts">
      <span class=${`state ${status.state}`}>${status.state ?? "unknown"}</span>
      ${status.reason && html`<span>${status.reason}</span>`}
      ${total > 0 && html`<progress value=${done} max=${total} aria-label="steps done"></progress><span>step ${done} of ${total}</span>`}
      ${status.elapsed_s > 0 && html`<span>since ${ago(status.elapsed_s)}</span>`}
      <span>${num(data.num_episodes)} episodes${data.is_complete ? "" : " so far: the index is being filled"}</span>
    </p>
    ${status.problem && html`<p class="problem">${status.problem}</p>`}
    <${Alarms} alarms=${status.alarms ?? []} now=${status.dataflow?.now_s ?? Date.now() / 1000} />
    ${data.notes.map((text) => html`<p class="note">${text}</p>`)}
    ${status.state === "running" && html`<section><h2>Services</h2><${Picture} status=${status} />
      ${(status.waits ?? []).slice(0, 6).map((text) => html`<p class="wait">${text}</p>`)}
      ${status.dataflow && html`<${Fates} policies=${status.dataflow.policies} />`}</section>`}
    <section><h2>Curves</h2><div class="charts">
      ${curves.map(([title, series]) => html`<${Chart} key=${title} title=${title} series=${series} />`)}</div>
      ${others.length > 0 && html`<details><summary>${others.length} more numbers</summary><${Others} rows=${rows} names=${others} /></details>`}
    </section>
    <section><h2>What happened</h2><ul class="happenings">
      ${data.happenings.map(
        (event) => html`<li><time>${clock(event.at_s)}</time> <b>${event.kind}</b> ${event.who}
          ${event.version != null ? ` version ${event.version}` : ""} ${event.text}</li>`,
      )}</ul></section>
    ${status.services?.length > 0 && html`<section><h2>Processes</h2><${Services} services=${status.services} /></section>`}`;
}

function Others({ rows, names }) {
  const [chosen, choose] = useState(names[0]);
  const series = useMemo(() => seriesOf(rows, [chosen]), [rows, chosen]);
  return html`<label>number <select value=${chosen} onChange=${(event) => choose(event.target.value)}>
      ${names.map((name) => html`<option>${name}</option>`)}</select></label>
    <${Chart} title=${chosen} series=${series} />`;
}
