// The tokens of one sequence, colored by what was measured of them.
import { useEffect, useRef, useState } from "preact/hooks";
import { html, num } from "./base.js";

// Each mode gives a token a class (a step of a scale) and the words of its tooltip.
const step = (value, bounds) => bounds.findIndex((bound) => value < bound) + 1 || bounds.length + 1;
const diverging = (value, scale) => {
  if (!value) return "z0";
  const size = step(Math.abs(value) / scale, [0.15, 0.4, 0.8]);
  return value > 0 ? `p${size}` : `m${size}`;
};

function modesOf(tokens) {
  const modes = {
    logprob: (idx) => [`u${6 - step(Math.exp(tokens.logprobs[idx]), [0.01, 0.1, 0.3, 0.7])}`, `logprob ${num(tokens.logprobs[idx])}, probability ${num(Math.exp(tokens.logprobs[idx]))}`],
    version: (idx) => [`v${tokens.versions[idx] % 6}`, `version ${tokens.versions[idx]}`],
    mask: () => ["p2", "sampled and trained"],
  };
  if (tokens.advantages.length) {
    modes.advantage = (idx) => [diverging(tokens.advantages[idx], 2), `advantage ${num(tokens.advantages[idx])}`];
  }
  for (const [name, values] of Object.entries(tokens.streams)) {
    // A stream of logprobs, such as a teacher's, against those of the sampling policy.
    modes[`ratio to ${name}`] = (idx) => {
      const gap = values[idx] - tokens.logprobs[idx];
      return [diverging(gap, 1), `exp(${name} − logprob) ${num(Math.exp(gap))}`];
    };
  }
  return modes;
}

// Long sequences grow as one scrolls: each token is an element, and a hundred thousand would take seconds.
const PAGE = 1500;

export function TokenText({ tokens, mode, from = 0, place }) {
  const [count, setCount] = useState(PAGE);
  const box = useRef(null);
  const end = useRef(null);
  const shown = Math.min(tokens.pieces.length, Math.max(from + count, (place?.at ?? 0) + PAGE));
  useEffect(() => {
    if (!end.current) return undefined;
    const watch = new IntersectionObserver(([entry]) => entry.isIntersecting && setCount(shown - from + PAGE), { root: box.current, rootMargin: "400px" });
    watch.observe(end.current);
    return () => watch.disconnect();
  }, [shown, tokens]);
  useEffect(() => {
    const turn = place && box.current.querySelector(`[data-at="${place.at}"]`);
    if (turn) box.current.scrollTo({ top: turn.offsetTop - box.current.offsetTop, behavior: "smooth" });
  }, [place]);
  const modes = modesOf(tokens);
  const describe = modes[mode] ?? modes.logprob;
  const starts = new Map(tokens.turns.map((turn, idx) => [turn.start, idx + 1]));
  const parts = [];
  for (let idx = from; idx < shown; idx += 1) {
    if (starts.has(idx)) {
      const turn = tokens.turns[starts.get(idx) - 1];
      parts.push(html`<span class="turn" data-at=${idx}>turn ${starts.get(idx)}${turn.reward ? `, reward ${num(turn.reward)}` : ""}</span>`);
    }
    const isSampled = tokens.mask[idx] === 1;
    if (isSampled && idx > 0 && tokens.mask[idx - 1] === 1 && tokens.versions[idx] !== tokens.versions[idx - 1]) {
      parts.push(html`<span class="turn">version ${tokens.versions[idx]}</span>`);
    }
    const [look, words] = isSampled ? describe(idx) : ["given", "given"];
    parts.push(html`<span class=${`t ${look}`} title=${`${words} · token ${idx}, id ${tokens.ids[idx]}`}>${tokens.pieces[idx] || "␀"}</span>`);
  }
  return html`<div class="tokens" tabindex="0" role="group" aria-label="tokens" ref=${box}>${parts}${shown < tokens.pieces.length && html`<span ref=${end} class="turn">${num(tokens.pieces.length - shown)} more</span>`}</div>
    ${tokens.num_left_out > 0 && html`<p class="note">${num(tokens.num_left_out)} more tokens are not shown.</p>`}`;
}

function Scale({ mode }) {
  const looks = {
    logprob: [["u1", "p ≥ 0.7"], ["u2", "≥ 0.3"], ["u3", "≥ 0.1"], ["u4", "≥ 0.01"], ["u5", "< 0.01"]],
    advantage: [["m3", "−"], ["z0", "0"], ["p3", "+"]],
    mask: [["p2", "sampled"]],
  };
  const scale = looks[mode] ?? (mode.startsWith("ratio") ? [["m3", "< 1"], ["z0", "1"], ["p3", "> 1"]] : []);
  return html`<span class="scale">${scale.map(([look, words]) => html`<span class=${`t ${look}`}>${words}</span>`)}<span class="t given">given</span></span>`;
}

export function ModePicker({ tokens, mode, choose, words = "color tokens by", others = [] }) {
  const names = [...others, ...(tokens ? Object.keys(modesOf(tokens)) : ["logprob", "version", "mask"])];
  return html`<p class="facts"><label>${words} <select value=${mode} onChange=${(event) => choose(event.target.value)}>
    ${names.map((name) => html`<option selected=${name === mode}>${name}</option>`)}</select></label>${!others.includes(mode) && html`<${Scale} mode=${mode} />`}</p>`;
}
