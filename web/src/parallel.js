// Parallel coordinates: an axis per differing key and figure, and a line per run, which leads to the run.
import { html, link, num, useWidth } from "./base.js";

const HEIGHT = 250;
const TOP = 34;
const LEFT = 64;
const RIGHT = 28;
const GAP = 148;
const MAX_KEYS = 8;
const MAX_TICKS = 7;
const cut = (text, most = 22) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const short = (key, keys) => {
  const last = key.split(".").at(-1);
  return keys.some((other) => other !== key && other.endsWith(`.${last}`)) ? key : last;
};

// Maps values to heights: numbers by their size, on a logarithmic axis if they differ widely; other values in turn.
function axisOf(title, name, values) {
  const known = values.filter((value) => value != null);
  const distinct = [...new Set(known)];
  const numbers = distinct.map(Number);
  const isNumeric = distinct.length > 0 && distinct.every((value) => value !== "") && numbers.every(Number.isFinite);
  const y = (part) => TOP + (1 - part) * (HEIGHT - TOP - 18);
  if (!isNumeric) {
    const part = (value) => (distinct.length > 1 ? distinct.indexOf(value) / (distinct.length - 1) : 0.5);
    return { title, name, at: (value) => y(part(value)), ticks: distinct.slice(0, MAX_TICKS).map((value) => [y(part(value)), String(value)]) };
  }
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const scale = low > 0 && high / low >= 20 ? Math.log : (value) => value;
  const part = (value) => (high > low ? (scale(Number(value)) - scale(low)) / (scale(high) - scale(low)) : 0.5);
  const shown = distinct.length <= MAX_TICKS ? distinct : [low, high];
  return { title, name, at: (value) => y(part(value)), ticks: shown.map((value) => [y(part(value)), typeof value === "string" ? value : num(value)]) };
}

export function Parallel({ members, keys, figures, links, order, lit, light }) {
  const [box, full] = useWidth();
  const seeds = new Set(members.map(({ seed }) => seed));
  const columns = [
    ...keys.slice(0, MAX_KEYS).map((key) => [short(key, keys), key, (member) => member.values[key]]),
    ...(seeds.size > 1 ? [["seed", "seed", (member) => member.seed || null]] : []),
    ...figures.slice(0, 3).map((figure) => [figure, figure, (member) => member.finals[figure]]),
  ];
  if (members.length < 2 || columns.length < 2) return null;
  const axes = columns.map(([title, name, of]) => ({ ...axisOf(title, name, members.map(of)), of }));
  const width = Math.max(full, LEFT + RIGHT + (axes.length - 1) * GAP);
  const x = (idx) => LEFT + (idx / (axes.length - 1)) * (width - LEFT - RIGHT);
  const chosen = members.find(({ name }) => name === lit);
  const words = (member) => `${member.name}: ${member.state}${figures.filter((figure) => member.finals[figure] != null).map((figure) => `, ${figure} ${num(member.finals[figure])}`).join("")}`;
  return html`<section><h2>Every run</h2>
    <p class="good-looks" aria-live="polite">${chosen ? words(chosen) : "A line is a run, from its values to its figures. Point at one to see which it is, and click it to open it."}</p>
    <div ref=${box} class="scroll parallel" tabindex="0" role="group" aria-label="runs as lines">${full > 0 && html`<svg width=${width} height=${HEIGHT} role="group" aria-label="values and figures of each run" onMouseLeave=${() => light("")}>
      ${axes.map((axis, idx) => html`<line class="axis" x1=${x(idx)} x2=${x(idx)} y1=${TOP} y2=${HEIGHT - 18} />`)}
      ${members.map((member) => html`<${Line} key=${member.name} ...${pathsOf(member, axes, x)} name=${member.name} run=${links[member.name]} idx=${order.get(member.variant)} isDim=${Boolean(chosen)} light=${light} words=${words(member)} />`)}
      ${chosen && html`<path class=${`${lookOf(order.get(chosen.variant))} lit`} d=${pathsOf(chosen, axes, x).path} />`}
      ${axes.map((axis, idx) => html`<g class="labels"><text class="title" x=${idx === 0 ? 6 : idx === axes.length - 1 ? width - 6 : x(idx)} y="16" text-anchor=${idx === 0 ? "start" : idx === axes.length - 1 ? "end" : "middle"}>${cut(axis.title)}<title>${axis.name}</title></text>
        ${axis.ticks.map(([y, text]) => html`<text x=${x(idx) - 7} y=${y + 4} text-anchor="end">${cut(text, 9)}</text>`)}</g>`)}
    </svg>`}</div></section>`;
}

// The line ends where the run has no value, as one that failed before its first evaluation.
function pathsOf(member, axes, x) {
  const values = axes.map((axis) => axis.of(member));
  const ends = values.findIndex((value) => value == null);
  const points = axes.slice(0, ends < 0 ? axes.length : ends).map((axis, at) => [x(at), axis.at(values[at])]);
  const path = points.map(([px, py], at) => {
    if (at === 0) return `M${px} ${py}`;
    const middle = (points[at - 1][0] + px) / 2;
    return `C${middle} ${points[at - 1][1]} ${middle} ${py} ${px} ${py}`;
  }).join("");
  return { path, end: points.at(-1) };
}

const lookOf = (idx) => `run-line ${idx == null ? "out" : `k${idx % 8}`}`;

// The chosen line is drawn once more above the others, because a line that moves in the document loses the focus.
function Line({ path, end, name, run, idx, isDim, light, words }) {
  if (!end) return null;
  const look = `${lookOf(idx)} ${isDim ? "dim" : ""}`;
  const parts = html`<path class="reach" d=${path} /><path class=${look} d=${path} />
    ${idx == null && html`<path class=${`${look} cross`} d=${`M${end[0] - 5} ${end[1] - 5}l10 10m0-10l-10 10`} />`}<title>${words}</title>`;
  const heard = { onMouseEnter: () => light(name), onFocus: () => light(name), onBlur: () => light("") };
  return run
    ? html`<a href=${link("r", run, "run")} aria-label=${`${words}; opens the run`} ...${heard}>${parts}</a>`
    : html`<g ...${heard}>${parts}</g>`;
}
