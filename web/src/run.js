// The page of one run: the answer, the dataflow, the curves, and what happened.
import { ago, html, link, num, Problem, useAnswer } from "./base.js";
import { Curves } from "./curves.js";
import { Events } from "./events.js";
import { Flow, liveFlow, Replay } from "./flow.js";
import { useMetrics } from "./series.js";

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

// The sentence and the four figures that say how the run goes.
function Answer({ answer, status }) {
  return html`<section class="answer" aria-label="how the run goes">
    <p class="sentence"><span class=${`state ${status.state}`}>${status.state ?? "unknown"}</span> ${answer?.sentence ?? "Nothing is known about this run yet."}</p>
    ${answer && html`<dl class="figures">${answer.figures.map(
      (figure) => html`<div class=${`figure ${figure.tone}`}><dt>${figure.name}</dt><dd>${figure.value}</dd><dd class="detail">${figure.detail}</dd></div>`,
    )}</dl>`}</section>`;
}

function Skeleton() {
  return html`<div class="skeleton" role="status"><span class="sr">Loading…</span><i class="tall"></i><i class="taller"></i><div class="charts"><i class="taller"></i><i class="taller"></i><i class="taller"></i></div></div>`;
}

// Where the groups of an ended run went.
function EndedFates({ summary }) {
  const policies = summary?.policies ?? [];
  return policies.length > 0 && html`<${Fates} policies=${policies} />`;
}

export function RunPage({ run }) {
  const base = `api/runs/${encodeURIComponent(run)}`;
  const { data, error } = useAnswer(`${base}/now`, 2000);
  const { data: index } = useAnswer(`${base}/index`, 5000);
  const rows = useMetrics(run, 4000);
  if (!data && error) return html`<${Problem} error=${error} />`;
  // All at once, so that nothing moves when a part arrives.
  if (!data || !rows) return html`<${Skeleton} />`;
  const { status } = data;
  const isLive = status.state === "running";
  return html`
    <${Problem} error=${error} />
    <${Answer} answer=${data.answer} status=${status} />
    ${status.problem && html`<p class="problem">${status.problem}</p>`}
    <${Alarms} alarms=${status.alarms ?? []} now=${status.dataflow?.now_s ?? Date.now() / 1000} />
    <section><h2>${isLive ? "The dataflow now" : "The dataflow at any time"}</h2>
      ${isLive ? html`<${Flow} ...${liveFlow(status)} />` : html`<${Replay} run=${run} rows=${rows} />`}
      ${(status.waits ?? []).slice(0, 6).map((text) => html`<p class="wait">${text}</p>`)}</section>
    <${Curves} rows=${rows} />
    <section><h2>Where the groups went</h2>
      ${status.dataflow ? html`<${Fates} policies=${status.dataflow.policies} />` : html`<${EndedFates} summary=${status.summary} />`}
      <p><a href=${`${link("r", run, "episodes")}?ready=discarded`}>Why groups were discarded</a></p></section>
    <${Events} happenings=${index?.happenings} />
    ${status.services?.length > 0 && html`<section><h2>Processes</h2><${Services} services=${status.services} /></section>`}
    <section class="muted"><p>${status.reason ? `${status.reason} · ` : ""}${index ? `${num(index.num_episodes)} episodes${index.is_complete ? "" : " so far: the index is being filled"}` : "the index is being filled"}</p>
      ${(index?.notes ?? []).map((text) => html`<p class="note">${text}</p>`)}</section>`;
}
