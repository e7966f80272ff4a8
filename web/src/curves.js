// The curves of a run, grouped by the question that they answer, with words for the names of metrics.
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { html, Segments } from "./base.js";
import { evalSeries, seriesOf } from "./series.js";
import QUESTIONS from "./questions.json";

const USED = new Set(QUESTIONS.flatMap(({ charts }) => charts.flatMap(({ lines }) => Object.keys(lines ?? {}))));
const HIDDEN = new Set(["step", "version", "at_s", "id", "kind", "policy", "eval_set", "best_by"]);

function groupsOf(rows, over) {
  return QUESTIONS.map(({ question, good, charts }) => ({ question, good, charts: charts
    .map(({ title, lines }) => ({ title, series: lines ? seriesOf(rows, lines, over) : evalSeries(rows, over) }))
    .map(({ title, series }) => ({ title, series: series.filter((line) => line.x.length > 0) }))
    .filter(({ series }) => series.length > 0) })).filter(({ charts }) => charts.length > 0);
}

export function Curves({ rows }) {
  const [over, setOver] = useState("step");
  const [isSmooth, setSmooth] = useState(true);
  const groups = useMemo(() => groupsOf(rows, over), [rows, over]);
  const others = useMemo(() => [...new Set(rows.filter((row) => row.kind === "step").flatMap((row) => Object.keys(row)))]
    .filter((name) => !USED.has(name) && !HIDDEN.has(name)), [rows]);
  if (groups.length === 0) return html`<p class="empty"><b>No curves yet</b>They begin with the first evaluation or step.</p>`;
  const tools = html`<div class="bar"><${Segments} label="x axis" value=${over} choose=${setOver} options=${[["step", "Steps"], ["seconds", "Time"]]} />
    <label class="check"><input type="checkbox" checked=${isSmooth} onChange=${() => setSmooth(!isSmooth)} />Smooth</label>
    <span class="muted wide" title="Double-click: all of it. Ctrl and the wheel: zoom.">Drag to zoom, Shift-drag to move</span></div>`;
  return html`${groups.map(({ question, good, charts }, idx) => html`<section key=${question} class="question">
      <div class="head"><h2>${question}</h2>${idx === 0 && tools}</div><p class="good-looks">${good}</p>
      <div class="charts">${charts.map(({ title, series }) => html`<${Chart} key=${title} title=${title} series=${series} xLabel=${over} isSmooth=${isSmooth} />`)}</div></section>`)}
    ${others.length > 0 && html`<details><summary>${others.length} more numbers</summary><${Others} rows=${rows} names=${others} /></details>`}`;
}

function Others({ rows, names }) {
  const [chosen, choose] = useState(names[0]);
  const series = useMemo(() => seriesOf(rows, { [chosen]: chosen }), [rows, chosen]);
  return html`<div class="bar"><label>Number <select value=${chosen} onChange=${(event) => choose(event.target.value)}>
      ${names.map((name) => html`<option>${name}</option>`)}</select></label></div>
    <div class="charts"><${Chart} title=${chosen} series=${series} /></div>`;
}
