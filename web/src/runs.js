// The start page: sweeps with their answers, and all runs. Two or more of them can be chosen and compared.
import { useEffect, useRef, useState } from "preact/hooks";
import { html, link, query, Skeleton, useAnswer, useSeen } from "./base.js";
import { Badge, statesText } from "./groups.js";

const MAX_SWEEPS = 10;

const when = (atS) => (atS ? new Date(atS * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–");

// How far a run is, and its score. A run that was killed has no summary, and making one takes long, so only its page does.
function Answer({ run }) {
  const box = useRef(null);
  const isSeen = useSeen(box);
  const isMoving = run.state === "running";
  const { data } = useAnswer(isSeen && (isMoving || run.is_summarized) ? `api/runs/${encodeURIComponent(run.name)}/now` : "", isMoving ? 10_000 : 0);
  const [score, progress] = data?.answer?.figures ?? [];
  return html`<td ref=${box} class="score">${score && html`<b class=${score.tone}>${score.value}</b> <small>${score.detail}</small>`}</td><td class="n" title=${progress?.detail}>${progress?.value}</td>`;
}

function RunTable({ runs, chosen, choose }) {
  return html`<div class="scroll" tabindex="0" role="group" aria-label="runs"><table class="runs"><thead><tr><th><span class="sr">choose</span></th><th>run</th><th>state</th><th class="score">held-out</th><th class="n">progress</th><th>recipe</th><th class="n">last sign of life</th><th>folder</th></tr></thead>
    <tbody>${runs.map((run) => html`<tr key=${run.name}><td><input type="checkbox" aria-label=${`choose ${run.name}`} checked=${chosen.includes(run.name)} onChange=${() => choose(run.name)} /></td>
      <td><a href=${link("r", run.name, "run")}>${run.name}</a></td><td><span class=${`state ${run.state}`}>${run.state}</span></td>
      <${Answer} run=${run} /><td>${run.problem ? html`<span class="problem">${run.problem}</span>` : run.recipe}</td><td class="n">${when(run.at_s)}</td><td class="muted" title=${run.path}>${run.path}</td></tr>`)}</tbody></table></div>`;
}

function Sweep({ sweep, runs, chosen, choose }) {
  const box = useRef(null);
  const isSeen = useSeen(box);
  const isMoving = ["running", "new"].some((state) => sweep.states[state]);
  const { data } = useAnswer(isSeen && !sweep.problem ? `api/groups/${encodeURIComponent(sweep.name)}` : "", isMoving ? 15_000 : 0);
  const compared = data?.compared;
  const verdict = compared?.comparison?.verdict;
  const others = statesText(sweep.states);
  return html`<li ref=${box} class="sweep card"><h3><a href=${link("sweep", sweep.name)}>${sweep.name}</a>
      <small>${sweep.num_runs} runs${others && `, ${others}`}</small></h3>
    ${sweep.problem ? html`<p class="problem">${sweep.problem}</p>` : html`<p>${verdict ? html`<${Badge} verdict=${verdict} /> ${verdict.headline}` : compared?.problem ?? "Reading its runs…"}</p>`}
    ${runs.length > 0 && html`<details><summary>Its runs</summary><${RunTable} runs=${runs} chosen=${chosen} choose=${choose} /></details>`}</li>`;
}

export function RunsPage({ runs }) {
  const { data: sweeps } = useAnswer("api/groups", 5000);
  const [chosen, setChosen] = useState([]);
  const [isAll, showAll] = useState(false);
  useEffect(() => {
    if (sweeps?.length === 1 && runs.every(({ sweep }) => sweep === sweeps[0].name)) location.replace(link("sweep", sweeps[0].name));
  }, [sweeps]);
  const choose = (name) => setChosen((old) => (old.includes(name) ? old.filter((each) => each !== name) : [...old, name]));
  const alone = runs.filter(({ sweep }) => !sweep);
  const shown = isAll ? (sweeps ?? []) : (sweeps ?? []).slice(0, MAX_SWEEPS);
  if (!sweeps) return html`<h1>Runs</h1><${Skeleton} />`;
  return html`<h1>Runs</h1>
    ${runs.length + sweeps.length === 0 && html`<p class="empty"><b>No runs yet</b>Start one with astraflow run quickstart. It appears here by itself.</p>`}
    ${runs.length > 1 && html`<p class="bar compare-bar"><button class="main" disabled=${chosen.length < 2} onClick=${() => { location.hash = `/compare?${query({ runs: chosen.join(",") })}`; }}>Compare</button>
      <span class="muted">${chosen.length === 0 ? "Choose two runs or more to see whether they differ." : `${chosen.length} chosen`}</span></p>`}
    ${sweeps.length > 0 && html`<section><h2>Sweeps</h2><ul class="sweeps">${shown.map((sweep) => html`<${Sweep} key=${sweep.name} sweep=${sweep} runs=${runs.filter((run) => run.sweep === sweep.name)} chosen=${chosen} choose=${choose} />`)}</ul>
      ${sweeps.length > MAX_SWEEPS && html`<button onClick=${() => showAll(!isAll)}>${isAll ? "Fewer" : `All ${sweeps.length} sweeps`}</button>`}</section>`}
    ${alone.length > 0 && html`<section>${sweeps.length > 0 && html`<h2>Single runs</h2>`}<${RunTable} runs=${alone} chosen=${chosen} choose=${choose} /></section>`}`;
}
