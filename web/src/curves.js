// The curves of a run, grouped by the question that they answer, with words for the names of metrics.
import { useMemo, useState } from "preact/hooks";
import { Chart } from "./charts.js";
import { html } from "./base.js";
import { evalSeries, seriesOf } from "./series.js";

// Question, what good looks like, and charts: title and the metrics in it with their words.
const QUESTIONS = [
  ["Does it learn?", "Good: the held-out score rises, and its band leaves that of the start. Reward rises with it, not without it.", [
    ["Held-out score", null],
    ["Training reward", { reward_mean: "mean of the groups trained on" }],
    ["Score of all episodes", { episode_score_mean: "also of groups that were discarded" }],
  ]],
  ["Is it stable?", "Good: entropy falls slowly and not to 0, KL and clipping stay small, and no gradient spikes again and again.", [
    ["Entropy", { entropy: "of the policy, nats per token" }],
    ["Drift from the sampling policy", { behavior_kl: "to the policy that sampled", kl: "KL", reference_kl: "to the reference" }],
    ["Clipped tokens", { clip_frac: "share of tokens" }],
    ["Gradient norm", { grad_norm: "before clipping" }],
    ["Loss", { loss: "its sign says little" }],
    ["Engine against trainer", { behavior_gap: "mean gap of logprobs" }],
    ["Largest gap, engine against trainer", { behavior_gap_max: "of any token" }],
  ]],
  ["Is it fast?", "Good: waiting is the smallest part of a step, and staleness stays below its bound.", [
    ["Seconds of a step", { train_s: "training", batch_wait_s: "waiting for a batch", publish_s: "publishing" }],
    ["Staleness", { staleness_mean: "mean, in versions", staleness_max: "largest" }],
    ["Seconds of an episode", { episode_s_mean: "mean", episode_s_max: "slowest" }],
  ]],
  ["Is it fair to all lengths?", "Good: few answers are cut off, lengths don't run away, and few groups are discarded.", [
    ["Sampled tokens of an episode", { "episode/sampled_tokens": "mean" }],
    ["Answers cut off", { "episode/truncated_frac": "share that reached the limit" }],
    ["Groups discarded", { num_discarded_groups: "since the last step" }],
    ["Turns of an episode", { "episode/turns": "mean" }],
  ]],
];
const USED = new Set(QUESTIONS.flatMap(([, , charts]) => charts.flatMap(([, names]) => Object.keys(names ?? {}))));
const HIDDEN = new Set(["step", "version", "at_s", "id", "kind", "policy", "eval_set", "best_by"]);

function chartsOf(rows, over) {
  return QUESTIONS.map(([question, good, charts]) => [question, good, charts
    .map(([title, names]) => [title, names ? seriesOf(rows, names, over) : evalSeries(rows, over)])
    .map(([title, series]) => [title, series.filter((line) => line.x.length > 0)])
    .filter(([, series]) => series.length > 0)]).filter(([, , charts]) => charts.length > 0);
}

export function Curves({ rows }) {
  const [over, setOver] = useState("step");
  const [isSmooth, setSmooth] = useState(true);
  const groups = useMemo(() => chartsOf(rows, over), [rows, over]);
  const others = useMemo(() => [...new Set(rows.filter((row) => row.kind === "step").flatMap((row) => Object.keys(row)))]
    .filter((name) => !USED.has(name) && !HIDDEN.has(name)), [rows]);
  if (groups.length === 0) return html`<p class="empty"><b>No curves yet.</b> They begin with the first evaluation or step.</p>`;
  return html`<div class="bar"><label>over <select value=${over} onChange=${(event) => setOver(event.target.value)}>
      <option value="step">steps</option><option value="seconds">time</option></select></label>
      <label class="check"><input type="checkbox" checked=${isSmooth} onChange=${() => setSmooth(!isSmooth)} /> smooth</label></div>
    ${groups.map(([question, good, charts]) => html`<section key=${question} class="question"><h2>${question}</h2><p class="good-looks">${good}</p>
      <div class="charts">${charts.map(([title, series]) => html`<${Chart} key=${title} title=${title} series=${series} xLabel=${over} isSmooth=${isSmooth} />`)}</div></section>`)}
    ${others.length > 0 && html`<details><summary>${others.length} more numbers</summary><${Others} rows=${rows} names=${others} /></details>`}`;
}

function Others({ rows, names }) {
  const [chosen, choose] = useState(names[0]);
  const series = useMemo(() => seriesOf(rows, { [chosen]: chosen }), [rows, chosen]);
  return html`<label>number <select value=${chosen} onChange=${(event) => choose(event.target.value)}>
      ${names.map((name) => html`<option>${name}</option>`)}</select></label>
    <${Chart} title=${chosen} series=${series} />`;
}
