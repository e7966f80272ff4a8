// Runs compared: which variant is ahead, whether chance explains it, and what each run did. A sweep has a page of its
// own; chosen runs are compared by the same parts.
import { useMemo, useState } from "preact/hooks";
import { ago, html, link, num, Problem, query, Skeleton, useAnswer } from "./base.js";
import { Chart } from "./charts.js";
import { Parallel } from "./parallel.js";

const AGAIN_MS = 5000;
const MAX_DRAWN = 8;
const fixed = (value) => (value == null ? "–" : value.toFixed(3));
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const between = ({ low, high }, text = fixed) => (low == null ? "no interval" : `interval ${text(low)} to ${text(high)}`);

// --- the answer ---

const BADGES = {
  "matters seeds": ["good", "more than chance"],
  "matters tasks": ["warn", "one run each"],
  "chance seeds": ["warn", "may be chance"],
  "chance tasks": ["warn", "may be chance"],
  "unknown none": ["warn", "one run each"],
};

const badgeOf = (verdict) => (verdict.outcome === "equal" ? ["", "no difference"] : BADGES[`${verdict.outcome} ${verdict.basis}`] ?? ["", ""]);

export function Badge({ verdict }) {
  const [tone, words] = badgeOf(verdict);
  return words && html`<span class=${`state verdict-${tone}`}>${words}</span>`;
}

// How many of the runs are in which state, without those that have finished.
export const statesText = (states) =>
  Object.entries(states).filter(([state]) => state !== "finished").map(([state, count]) => `${count} ${state}`).join(", ");

const countStates = (members) => {
  const states = {};
  for (const { state } of members) states[state] = (states[state] ?? 0) + 1;
  return states;
};

function Figure({ name, value, detail, tone = "" }) {
  return html`<div class=${`figure ${tone}`}><dt>${name}</dt><dd class=${`${String(value).length > 12 ? "long" : ""} ${tone === "bad" ? "amiss" : ""}`}>${value}</dd><dd class="detail">${detail}</dd></div>`;
}

function Answer({ compared }) {
  const { comparison, members, problem } = compared;
  if (!comparison) {
    return html`<section class="answer" aria-label="how the runs compare"><p class="sentence">These runs can't be compared.</p><p class="note">${problem}</p></section>`;
  }
  const { verdict, variants } = comparison;
  const best = variants.find(({ label }) => label === verdict.best);
  const [tone] = badgeOf(verdict);
  const counted = members.filter(({ left_out }) => !left_out).length;
  const others = statesText(countStates(members));
  return html`<section class="answer" aria-label="how the runs compare">
    <p class="sentence"><${Badge} verdict=${verdict} /> ${verdict.headline}</p>
    ${verdict.detail && html`<p class="muted detail-line">${verdict.detail}</p>`}
    <dl class="figures">
      <${Figure} name=${verdict.other && verdict.outcome !== "equal" ? "Ahead" : "Variant"} value=${verdict.best} detail=${best.runs.length === 1 ? `one run: ${best.runs[0]}` : `mean of ${best.runs.length} runs`} />
      <${Figure} name=${verdict.figure} value=${fixed(verdict.score.mean)} detail=${between(verdict.score)} />
      <${Figure} name="Lead" value=${verdict.gap ? signed(verdict.gap.mean) : "–"} detail=${verdict.gap ? `over ${verdict.other}; ${between(verdict.gap, signed)}` : "nothing to compare with"} tone=${tone} />
      <${Figure} name="Runs that count" value=${`${counted} of ${members.length}`} detail=${others || "all have finished"} tone=${counted < members.length ? "bad" : ""} />
    </dl></section>`;
}

// --- variants ---

// The mean as a dot and its interval as a line, on one scale for all variants.
function Whisker({ interval, range, idx }) {
  const [from, to] = range;
  const x = (value) => 6 + ((value - from) / (to - from)) * 148;
  const { mean, low, high } = interval;
  return html`<svg class=${`whisker k${idx % 8}`} width="160" height="14" aria-hidden="true">
    <line class="rail" x1="6" x2="154" y1="7" y2="7" />
    ${low != null && html`<line  x1=${x(low)} x2=${x(high)} y1="7" y2="7" />`}
    <circle  cx=${x(mean)} cy="7" r="4.5" /></svg>`;
}

function rangeOf(variants, figure) {
  const values = variants.flatMap(({ figures: { [figure]: each } }) => [each.low ?? each.mean, each.high ?? each.mean]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high - low > 1e-9 * Math.max(1, Math.abs(high)) ? [low, high] : [low - 0.5, high + 0.5];
}

function Variants({ variants, figures }) {
  const [isAll, showAll] = useState(false);
  const ranges = Object.fromEntries(figures.map((figure) => [figure, rangeOf(variants, figure)]));
  return html`<section><h2>Final figures</h2>
    <p class="good-looks">Best first. A dot is the mean, and with several seeds a line is its 95% interval. Variants whose lines don't overlap differ by more than chance.</p>
    <div class="scroll" tabindex="0" role="group" aria-label="final figures"><table>
      <thead><tr><th>variant</th><th class="n">runs</th>${figures.map((figure) => html`<th>${figure}</th>`)}</tr></thead>
      <tbody>${(isAll ? variants : variants.slice(0, MAX_DRAWN)).map((variant, idx) => html`<tr key=${variant.label}><td title=${variant.label}><span class=${`key k${idx % 8}`}></span>${variant.label}</td><td class="n">${variant.runs.length}</td>
        ${figures.map((figure) => {
          const interval = variant.figures[figure];
          return html`<td><b class="n">${fixed(interval.mean)}</b> ${interval.low != null && html`<small class="n">${fixed(interval.low)} to ${fixed(interval.high)}</small>`}<br /><${Whisker} interval=${interval} range=${ranges[figure]} idx=${idx} /></td>`;
        })}</tr>`)}</tbody></table></div>
    ${variants.length > MAX_DRAWN && html`<button onClick=${() => showAll(!isAll)}>${isAll ? "Fewer" : `All ${variants.length} variants`}</button>`}</section>`;
}

function Bands({ variants, figures }) {
  const drawn = variants.slice(0, MAX_DRAWN);
  const charts = useMemo(() => figures.map((figure) => [figure, drawn.map(({ label, bands }) => {
    const points = bands[figure];
    const line = { label, x: points.map(([step]) => step), y: points.map(([, mean]) => mean) };
    return points.some(([, , low]) => low != null) ? { ...line, low: points.map(([, , low]) => low), high: points.map(([, , , high]) => high) } : line;
  })]), [variants]);
  return html`<section><h2>Over the steps</h2>
    <p class="good-looks">Mean over seeds, with the 95% interval as a band${variants.length > MAX_DRAWN ? `, of the best ${MAX_DRAWN} of ${variants.length} variants` : ""}.</p>
    <div class="charts">${charts.map(([figure, series]) => html`<${Chart} key=${figure} title=${figure} series=${series} />`)}</div></section>`;
}

function Keys({ keys, variants }) {
  if (keys.length === 0) return html`<section><h2>Where the recipes differ</h2><p>They are equal but for the seed.</p></section>`;
  const isShort = variants.length <= MAX_DRAWN;
  const valuesOf = (key) => [...new Set(variants.map(({ values }) => values[key]))].join(", ");
  return html`<section><h2>Where the recipes differ</h2><div class="scroll" tabindex="0" role="group" aria-label="differing keys"><table>
    <thead><tr><th>key</th>${isShort ? variants.map(({ label }) => html`<th title=${label}>${label}</th>`) : html`<th>values</th>`}</tr></thead>
    <tbody>${keys.map((key) => html`<tr key=${key}><td title=${key}>${key}</td>${isShort ? variants.map(({ values }) => html`<td title=${values[key]}>${values[key]}</td>`) : html`<td>${valuesOf(key)}</td>`}</tr>`)}</tbody></table></div></section>`;
}

// --- runs ---

function Members({ members, links, figures, order, lit, light }) {
  const names = figures.length > 0 ? figures : [...new Set(members.flatMap(({ finals }) => Object.keys(finals)))];
  return html`<section><h2>Runs</h2><div class="scroll" tabindex="0" role="group" aria-label="runs"><table>
    <thead><tr><th>run</th><th>state</th><th class="n">seed</th><th class="n">steps</th><th class="n">time</th>${names.map((name) => html`<th class="n">${name}</th>`)}<th>note</th></tr></thead>
    <tbody>${members.map((member) => html`<tr key=${member.name} class=${[member.state === "failed" ? "bad" : "", member.name === lit ? "lit" : ""].join(" ")} onMouseEnter=${() => light(member.name)}>
      <td title=${member.name}>${member.variant && html`<span class=${`key k${order.get(member.variant) % 8}`}></span>`}${links[member.name] ? html`<a href=${link("r", links[member.name], "run")}>${member.name}</a>` : member.name}</td>
      <td><span class=${`state ${member.state}`}>${member.state}</span></td><td class="n">${member.seed || "–"}</td><td class="n">${num(member.steps)}</td><td class="n">${member.wall_s ? ago(member.wall_s) : "–"}</td>
      ${names.map((name) => html`<td class="n">${fixed(member.finals[name])}</td>`)}
      <td class="reason" title=${member.reason}>${member.left_out ? `left out: ${member.left_out}` : member.state === "finished" ? "" : member.reason}</td></tr>`)}</tbody></table></div></section>`;
}

// Best first, so that colors, curves and rows agree.
function ranked(comparison) {
  if (!comparison) return [];
  const [first] = comparison.figures;
  return [...comparison.variants].sort((a, b) => b.figures[first].mean - a.figures[first].mean);
}

export function Judged({ compared, hasCurves = true }) {
  const [lit, light] = useState("");
  const { comparison, members, links } = compared;
  const variants = useMemo(() => ranked(comparison), [compared]);
  const order = new Map(variants.map(({ label }, idx) => [label, idx]));
  const figures = comparison?.figures ?? [];
  return html`<${Answer} compared=${compared} />
    ${comparison && html`<${Variants} variants=${variants} figures=${figures} />
      ${hasCurves && html`<${Bands} variants=${variants} figures=${figures} />`}
      <${Parallel} members=${members} keys=${comparison.keys} figures=${figures} links=${links} order=${order} lit=${lit} light=${light} />
      ${hasCurves && html`<${Keys} keys=${comparison.keys} variants=${variants} />`}`}
    <${Members} members=${members} links=${links} figures=${figures} order=${order} lit=${lit} light=${light} />
    ${comparison && html`<section class="muted">${comparison.variants.length > 2 && html`<details><summary>Each variant against ${comparison.variants[0].label}</summary>${comparison.sentences.map((text) => html`<p>${text}</p>`)}</details>`}
      <ul class="remarks">${comparison.notes.map((text) => html`<li>${text}</li>`)}</ul></section>`}`;
}

const isMoving = (compared) => compared.members.some(({ state }) => ["running", "new", "missing"].includes(state));

export function SweepPage({ name }) {
  const [everyMs, setEvery] = useState(AGAIN_MS);
  const { data, error } = useAnswer(`api/groups/${encodeURIComponent(name)}`, everyMs);
  if (data && !isMoving(data.compared) && everyMs) setEvery(0);
  const title = html`<h1><span class="muted">Sweep</span> ${name}</h1>`;
  if (!data) return html`${title}<${Problem} error=${error} />${!error && html`<${Skeleton} />`}`;
  return html`${title}<p class="muted origin">${data.recipe}${Object.entries(data.values).map(([key, values]) => ` · ${key} = ${values.join(", ")}`)}</p>
    <${Problem} error=${error && `${error} What you see is how it was.`} /><${Judged} compared=${data.compared} />`;
}

// `curves` draws the rest of the page, for the runs in the order of their variants, so that colors agree.
export function ChosenRuns({ runs, curves }) {
  const [everyMs, setEvery] = useState(AGAIN_MS);
  const { data, error } = useAnswer(`api/comparison?${query({ runs: runs.join(",") })}`, everyMs);
  if (data && !isMoving(data) && everyMs) setEvery(0);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Skeleton} />`}`;
  const places = new Map(ranked(data.comparison).flatMap((variant) => variant.runs).map((name, idx) => [name, idx]));
  const place = (name) => places.get(name) ?? runs.length;
  return html`<${Problem} error=${error} /><${Judged} compared=${data} hasCurves=${false} />${curves([...runs].sort((a, b) => place(a) - place(b)))}`;
}
