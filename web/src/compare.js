// Chosen runs against each other: whether they differ, their curves, and where their recipes differ.
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { html, Problem, Segments, Skeleton, useAnswer } from "./base.js";
import { openEpisodes } from "./curves.js";
import { ChosenRuns } from "./groups.js";
import { evalSeries, seriesOf, useMetrics } from "./series.js";

const MAX_RUNS = 8;
const CURVES = {
  reward_mean: "Training reward", loss: "Loss", entropy: "Entropy", grad_norm: "Gradient norm", staleness_mean: "Staleness",
  "episode/sampled_tokens": "Sampled tokens of an episode", train_s: "Seconds of training", batch_wait_s: "Seconds of waiting for a batch",
};

const tokensSoFar = (rows) => {
  let tokens = 0;
  return rows.map((row) => {
    tokens += row.kind === "step" ? (row.num_trained_tokens ?? 0) : 0;
    return { ...row, tokens_so_far: tokens };
  });
};

function Recipes({ runs }) {
  const answers = runs.map((run) => useAnswer(`api/runs/${encodeURIComponent(run)}/recipe`));
  if (answers.some(({ data }) => !data)) return html`<${Problem} error=${answers.find((a) => a.error)?.error} />`;
  const keys = [...new Set(answers.flatMap(({ data }) => Object.keys(data)))].sort();
  const differing = keys.filter((key) => new Set(answers.map(({ data }) => data[key])).size > 1);
  if (differing.length === 0) return html`<p>Their recipes are equal.</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label="differences"><table><thead><tr><th>key</th>${runs.map((run) => html`<th>${run}</th>`)}</tr></thead>
    <tbody>${differing.map((key) => html`<tr><td>${key}</td>${answers.map(({ data }) => html`<td>${data[key] ?? "–"}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Curves({ runs }) {
  const [over, setOver] = useState("step");
  const tables = runs.map((run) => useMetrics(run, 3000));
  const isThere = tables.every(Boolean);
  const charts = useMemo(() => (isThere ? chartsOf(runs, tables.map(tokensSoFar), over) : []), [over, ...tables]);
  return html`<section class="question"><div class="head"><h2>Over the run</h2><${Segments} label="x axis" value=${over} options=${[["step", "Steps"], ["seconds", "Time"], ["tokens", "Trained tokens"]]} choose=${setOver} /></div>
    ${!isThere && html`<${Skeleton} />`}<div class="charts">${charts.map(([title, series]) => html`<${Chart} key=${title} name=${title} title=${title} xLabel=${over} series=${series} open=${(row, line) => openEpisodes(line.run, row)} />`)}</div></section>
    <section><h2>Where their recipes differ</h2><${Recipes} runs=${runs} /></section>`;
}

// A run has one color in all charts.
function chartsOf(runs, tables, over) {
  const lines = (make) => tables.flatMap((rows, color) => make(rows, `${runs[color]}: `).map((line) => ({ ...line, color, run: runs[color] })));
  const all = [["Held-out score", lines((rows, prefix) => evalSeries(rows, over, prefix))],
    ...Object.entries(CURVES).map(([name, title]) => [title, lines((rows, prefix) => seriesOf(rows, { [name]: "" }, over, prefix))])];
  return all.map(([title, series]) => [title, series.filter(({ x }) => x.length > 0)]).filter(([, series]) => series.length > 0);
}

// Without a choice, the two runs that were active last.
function newest(all) {
  return [...all].sort((a, b) => b.at_s - a.at_s).slice(0, 2).map(({ name }) => name);
}

export function ComparePage({ all, params }) {
  const [first] = useState(() => newest(all));
  const wanted = params.has("runs") ? params.get("runs").split(",") : first;
  const chosen = wanted.filter((run) => all.some(({ name }) => name === run)).slice(0, MAX_RUNS);
  const toggle = (name) => {
    const next = chosen.includes(name) ? chosen.filter((run) => run !== name) : [...chosen, name];
    location.hash = `/compare?runs=${next.map(encodeURIComponent).join(",")}`;
  };
  return html`<details open=${chosen.length < 2}><summary>${chosen.length > 0 ? `${chosen.join(", ")} – choose others` : "Choose runs"}</summary>
      <fieldset class="facts"><legend class="sr">runs</legend>${all.map(
        ({ name }) => html`<label class="check"><input type="checkbox" checked=${chosen.includes(name)} disabled=${chosen.length === MAX_RUNS && !chosen.includes(name)} onChange=${() => toggle(name)} /> ${name}</label>`,
      )}</fieldset></details>
    ${chosen.length > 1 ? html`<${ChosenRuns} key=${chosen.join()} runs=${chosen} curves=${(runs) => html`<${Curves} key=${runs.join()} runs=${runs} />`} />` : html`<p class="empty">Choose two runs or more to see whether they differ.</p>`}`;
}
