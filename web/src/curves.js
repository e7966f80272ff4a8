// The curves of a run, grouped by the question that they answer, with words for the names of metrics.
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { html, link, query, Segments } from "./base.js";
import { useChoices } from "./choices.js";
import { evalSeries, seriesOf } from "./series.js";
import QUESTIONS from "./questions.json";

const USED = new Set(QUESTIONS.flatMap(({ charts }) => charts.flatMap(({ lines }) => Object.keys(lines ?? {}))));
const HIDDEN = new Set(["step", "version", "at_s", "id", "kind", "policy", "eval_set", "best_by"]);

function groupsOf(rows, over, pinned, others) {
  const groups = QUESTIONS.map(({ question, good, charts }) => ({ question, good, charts: charts
    .map(({ title, lines }) => ({ title, series: lines ? seriesOf(rows, lines, over) : evalSeries(rows, over) }))
    .map(({ title, series }) => ({ title, series: series.filter((line) => line.x.length > 0) }))
    .filter(({ series }) => series.length > 0) }));
  const every = groups.flatMap(({ charts }) => charts);
  const extra = (name) => (others.includes(name) ? { title: name, series: seriesOf(rows, { [name]: name }, over) } : null);
  const kept = pinned.map((name) => every.find(({ title }) => title === name) ?? extra(name)).filter(Boolean);
  const rest = groups.map((group) => ({ ...group, charts: group.charts.filter(({ title }) => !pinned.includes(title)) }));
  return [{ question: "Kept at the top", good: "The pin of a chart puts it here, in this browser, for all runs.", charts: kept }, ...rest].filter(({ charts }) => charts.length > 0);
}

// The episodes behind a point of a curve: those that a step trained on, or of an evaluation.
export function openEpisodes(run, { kind, policy, step, version }) {
  const filters = kind === "eval" ? { kind, policy, version } : { policy, step };
  location.hash = `${link("r", run, "episodes").slice(1)}?${query(filters)}`;
}

export function Curves({ run, rows }) {
  const [over, setOver] = useState("step");
  const [isSmooth, setSmooth] = useState(true);
  const { pinned } = useChoices();
  const others = useMemo(() => [...new Set(rows.filter((row) => row.kind === "step").flatMap((row) => Object.keys(row)))]
    .filter((name) => !USED.has(name) && !HIDDEN.has(name)), [rows]);
  const groups = useMemo(() => groupsOf(rows, over, pinned, others), [rows, over, pinned]);
  const open = (row) => openEpisodes(run, row);
  if (groups.length === 0) return html`<p class="empty"><b>No curves yet</b>They begin with the first evaluation or step.</p>`;
  const tools = html`<div class="bar"><${Segments} label="x axis" value=${over} choose=${setOver} options=${[["step", "Steps"], ["seconds", "Time"]]} />
    <label class="check"><input type="checkbox" checked=${isSmooth} onChange=${() => setSmooth(!isSmooth)} />Smooth</label>
    <span class="muted wide" title="Shift and drag: move. Double-click: all of it. Ctrl and the wheel: zoom.">Click a point for its episodes, drag to zoom</span></div>`;
  return html`${groups.map(({ question, good, charts }, idx) => html`<section key=${question} class="question">
      <div class="head"><h2>${question}</h2>${idx === 0 && tools}</div><p class="good-looks">${good}</p>
      <div class="charts">${charts.map(({ title, series }) => html`<${Chart} key=${title} name=${title} title=${title} series=${series} xLabel=${over} isSmooth=${isSmooth} open=${open} />`)}</div></section>`)}
    ${others.length > 0 && html`<${Others} rows=${rows} names=${others} over=${over} isSmooth=${isSmooth} open=${open} />`}`;
}

const MOST_OTHERS = 12;

// Every other number, by a part of its name. The pin of a chart keeps it.
function Others({ rows, names, over, isSmooth, open }) {
  const [isOpen, toggle] = useState(false);
  const [part, filter] = useState("");
  const found = names.filter((name) => name.toLowerCase().includes(part.toLowerCase()));
  const charts = useMemo(() => (isOpen ? found.slice(0, MOST_OTHERS).map((name) => [name, seriesOf(rows, { [name]: name }, over)]) : []), [rows, over, part, isOpen]);
  return html`<details onToggle=${(event) => toggle(event.currentTarget.open)}><summary>${names.length} more numbers</summary>
    <div class="bar"><label>Name <input type="search" value=${part} placeholder="a part of it" onInput=${(event) => filter(event.target.value)} /></label>
      <span class="muted">${found.length > MOST_OTHERS ? `the first ${MOST_OTHERS} of ${found.length}` : found.length === 0 ? "no number has such a name" : ""}</span></div>
    <div class="charts">${charts.map(([name, series]) => html`<${Chart} key=${name} name=${name} title=${name} series=${series} xLabel=${over} isSmooth=${isSmooth} open=${open} />`)}</div></details>`;
}
