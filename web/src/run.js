// The page of one run: the answer, the dataflow, the curves, and what happened.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ago, clock, html, link, num, Problem, Skeleton, useAnswer, useSeen } from "./base.js";
import { Curves } from "./curves.js";
import { Events } from "./events.js";
import { Flow, liveFlow, Replay } from "./flow.js";
import { Icon } from "./icons.js";
import { useMetrics } from "./series.js";

const minute = (atS) => clock(atS).slice(0, 5);

function Services({ services }) {
  return html`<div class="scroll" tabindex="0" role="group" aria-label="table"><table>
    <caption class="sr">processes of the run</caption>
    <thead><tr><th>service</th><th>state</th><th class="n">process</th><th class="n">restarts</th><th class="n">silent for</th><th>trouble</th></tr></thead>
    <tbody>${services.map(
      (s) => html`<tr class=${s.trouble || s.is_silent ? "bad" : ""}>
        <td>${s.name}</td><td>${s.state}</td><td class="n">${s.pid}</td><td class="n">${s.restarts > 0 ? html`${s.restarts}, last at ${minute(Date.now() / 1000 - s.age_s)}` : 0}</td>
        <td class="n">${s.silent_s == null ? "–" : ago(s.silent_s)}</td><td>${s.trouble || s.last_line}</td></tr>`,
    )}</tbody></table></div>`;
}

// What the watchdog found: why the run stands still or learns nothing, for how long, and what to do.
function Alarms({ alarms, now }) {
  return alarms.map(
    (alarm) => html`<p key=${`${alarm.rule} ${alarm.subject}`} class="problem" role="alert" data-rule=${alarm.rule}>
      ${alarm.evidence}${alarm.advice && html`<span class="advice">${alarm.advice}</span>`}
      <small>${alarm.rule}, for ${ago(now - alarm.since_s)}</small></p>`,
  );
}

const FATES = ["trained", "live", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"];

// How the groups of each policy ended: a bar of shares, and the numbers.
function Fates({ policies }) {
  return policies.map((policy) => {
    const { drawn } = policy.fates;
    const shown = FATES.filter((name) => policy.fates[name] > 0);
    return html`<div class="fates card" key=${policy.name}><div class="bar"><b>${policy.name}</b><span class="muted n">${num(drawn)} groups drawn · staleness bound ${num(policy.staleness_bound)} versions</span></div>
      <div class="stack" aria-hidden="true">${shown.map((name) => html`<i key=${name} class=${`fate ${name}`} style=${{ flexGrow: policy.fates[name], flexBasis: 0 }}></i>`)}</div>
      <ul class="legend">${shown.map((name) => html`<li key=${name}><span class=${`key fate ${name}`}></span>${name} <b>${num(policy.fates[name])}</b> ${percent(policy.fates[name] / drawn)}</li>`)}</ul></div>`;
  });
}

const percent = (share) => `${share > 0 && share < 0.01 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
const TONES = { good: "up", warn: "flat", bad: "down" };

// A figure's value with its unit apart, and the way that a score went as an arrow.
function Figure({ figure }) {
  const [, value, unit] = /^(.*?)(?: (tokens\/s))?$/.exec(figure.value);
  const share = figure.name === "Progress" && figure.value.endsWith("%") ? Number.parseFloat(figure.value) : null;
  return html`<div class=${`figure ${figure.tone}`}><dt>${figure.name}</dt>
    <dd>${TONES[figure.tone] && html`<${Icon} name=${TONES[figure.tone]} />`}${value}${unit && html`<span class="unit">${unit}</span>`}</dd>
    <dd class="detail">${figure.detail}${share != null && html`<span class="meter" aria-hidden="true"><i style=${{ width: `${share}%` }}></i></span>`}</dd></div>`;
}

const isOver = (status) => Boolean(status.state) && status.state !== "running";

// What is said if there is no answer.
function without(data) {
  if (!isOver(data.status)) return "Nothing is known about this run yet.";
  if (data.unreadable) return "It ended without a summary, and its results can't be computed from its journal.";
  return "It ended without a summary. Its results appear here once they are computed from the journal.";
}

// The sentence and the four figures that say how the run goes.
function Answer({ data }) {
  const { answer, status } = data;
  return html`<section class="answer" aria-label="how the run goes">
    <p class="sentence"><span class=${`state ${status.state}`}>${status.state ?? "unknown"}</span> ${answer?.sentence ?? without(data)}</p>
    ${answer && html`<dl class="figures">${answer.figures.map((figure) => html`<${Figure} key=${figure.name} figure=${figure} />`)}</dl>`}</section>`;
}

// Why there are no results, and what to do about it.
function Unreadable({ data }) {
  const { summary } = data.status;
  const why = data.unreadable || (summary?.policies.length === 0 ? summary.audit_problems.join("; ") : "");
  return why && html`<p class="problem" role="alert">${why}<span class="advice">The curves and episodes below are what can still be read. <code>astraflow audit ${data.path}</code> says what is damaged.</span></p>`;
}

// Who waits for whom: always two lines, so that nothing below moves when a wait begins or ends.
function Waits({ waits, none }) {
  const more = waits.length > 2 ? ` · and ${waits.length - 2} more` : "";
  return html`<div class="waits" title=${waits.join("\n")}><p>${waits[0] ?? none}</p><p>${waits[1] ?? ""}${more}</p></div>`;
}

// Where the groups of an ended run went.
function EndedFates({ summary }) {
  const policies = summary?.policies ?? [];
  return policies.length > 0 && html`<${Fates} policies=${policies} />`;
}

// What happened, the processes, and what the index knows. The index costs the machine of the run something, so it is asked
// often only while this is on the screen.
function Happened({ run, status }) {
  const box = useRef(null);
  const isSeen = useSeen(box);
  const { data: index } = useAnswer(`api/runs/${encodeURIComponent(run)}/index`, isSeen ? 5000 : 30_000);
  const count = index ? `${num(index.num_episodes)} episodes${index.is_complete ? "" : " so far: the index is being filled"}` : "The index is being filled";
  return html`<div ref=${box}><${Events} happenings=${index?.happenings} />
    ${status.services?.length > 0 && html`<section><h2>Processes</h2><${Services} services=${status.services} /></section>`}
    <section class="muted"><p>${status.reason ? `${status.reason} · ` : ""}${count}</p>${(index?.notes ?? []).map((text) => html`<p class="note">${text}</p>`)}</section></div>`;
}

export function RunPage({ run }) {
  const [isEnded, setEnded] = useState(false);
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}/now`, isEnded ? 10_000 : 2000);
  const rows = useMetrics(run, 4000);
  const curves = useMemo(() => rows && html`<${Curves} run=${run} rows=${rows} />`, [rows]);
  useEffect(() => data && setEnded(isOver(data.status)), [data]);
  if (!data && error) return html`<${Problem} error=${error} />`;
  // All at once, so that nothing moves when a part arrives.
  if (!data || !rows) return html`<${Skeleton} />`;
  const { status } = data;
  const isLive = status.state === "running";
  return html`
    <${Problem} error=${error} />
    <${Answer} data=${data} />
    <${Unreadable} data=${data} />
    ${status.problem && html`<p class="problem">${status.problem}</p>`}
    <${Alarms} alarms=${status.alarms ?? []} now=${status.dataflow?.now_s ?? Date.now() / 1000} />
    <section><h2>${isLive ? "The dataflow now" : "The dataflow at any time"}</h2>
      ${isLive ? html`<${Flow} ...${liveFlow(status)} />` : html`<${Replay} run=${run} rows=${rows} services=${status.services ?? []} />`}
      ${isLive && html`<${Waits} waits=${status.waits ?? []} none=${status.dataflow ? "Nobody waits." : ""} />`}</section>
    ${curves}
    <section><h2>Where the groups went</h2>
      ${status.dataflow ? html`<${Fates} policies=${status.dataflow.policies} />` : html`<${EndedFates} summary=${status.summary} />`}
      <p><a href=${`${link("r", run, "episodes")}?ready=discarded`}>Why groups were discarded</a></p></section>
    <${Happened} run=${run} status=${status} />`;
}
