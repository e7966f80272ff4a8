// One episode as the agent saw it, and its group side by side.
import { useEffect, useState } from "preact/hooks";
import { clock, html, link, num, Problem, query, useAnswer } from "./base.js";
import { endOf, nameOf, versionsOf } from "./episodes.js";

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

function TokenText({ tokens, mode }) {
  const modes = modesOf(tokens);
  const describe = modes[mode] ?? modes.logprob;
  const starts = new Map(tokens.turns.map((turn, idx) => [turn.start, idx + 1]));
  const parts = [];
  tokens.pieces.forEach((piece, idx) => {
    if (starts.has(idx)) {
      const turn = tokens.turns[starts.get(idx) - 1];
      parts.push(html`<span class="turn">turn ${starts.get(idx)}${turn.reward ? `, reward ${num(turn.reward)}` : ""}</span>`);
    }
    const isSampled = tokens.mask[idx] === 1;
    if (isSampled && idx > 0 && tokens.mask[idx - 1] === 1 && tokens.versions[idx] !== tokens.versions[idx - 1]) {
      parts.push(html`<span class="turn">version ${tokens.versions[idx]}</span>`);
    }
    const [look, words] = isSampled ? describe(idx) : ["given", "given"];
    parts.push(html`<span class=${`t ${look}`} title=${`${words} · token ${idx}, id ${tokens.ids[idx]}`}>${piece || "␀"}</span>`);
  });
  return html`<div class="tokens" tabindex="0" role="group" aria-label="tokens">${parts}</div>
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

export function Body({ view, mode }) {
  return html`
    ${view.problems.map((text) => html`<p class="note">${text}</p>`)}
    ${view.failure && html`<pre class="failure">${view.failure}</pre>`}
    ${view.tokens && html`<${TokenText} tokens=${view.tokens} mode=${mode} />`}
    ${view.messages.length > 0 &&
    html`<details open=${!view.tokens}><summary>${view.messages.length} messages</summary>
      ${view.messages.map((m) => html`<div class=${`message ${m.role}`}><b>${m.name || m.role}</b><pre>${m.content}</pre></div>`)}</details>`}`;
}

function ModePicker({ tokens, mode, choose }) {
  const names = tokens ? Object.keys(modesOf(tokens)) : ["logprob", "version", "mask"];
  return html`<p class="facts"><label>colour tokens by <select value=${mode} onChange=${(event) => choose(event.target.value)}>
    ${names.map((name) => html`<option selected=${name === mode}>${name}</option>`)}</select></label><${Scale} mode=${mode} /></p>`;
}

// j and k lead to the next and the previous episode of the list that was open last.
function useNeighbours(run, id) {
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const ids = (sessionStorage.getItem(`astraflow-list ${run}`) ?? "").split(",");
      const next = ids[ids.indexOf(String(id)) + ({ j: 1, k: -1 }[event.key] ?? Number.NaN)];
      if (next && ids.includes(String(id))) location.hash = link("r", run, "episode", next).slice(1);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [run, id]);
}

export function EpisodePage({ run, id }) {
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}/episodes/${encodeURIComponent(id)}`);
  const [mode, choose] = useState("logprob");
  useNeighbours(run, id);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<p class="loading">Loading…</p>`}`;
  const { row } = data;
  const facts = [
    ["task", html`<a href=${`${link("r", run, "episodes")}?${query({ task: row.task ?? "" })}`}>${row.task ?? "–"}</a> (all versions)`],
    ["policy", `${row.policy ?? "–"}${row.role && row.role !== row.policy ? ` as ${row.role}` : ""}`],
    ["reward", num(row.reward)],
    ["score", num(row.score)],
    ["advantage", num(row.advantage)],
    ["versions", versionsOf(row)],
    ["tokens", `${num(row.tokens)}, ${num(row.trained_tokens)} of them trained, in ${num(row.turns)} turns`],
    ["end", endOf(row)],
    ["step", row.step == null ? "–" : `${row.step}, staleness ${row.staleness}`],
    ["service", row.worker ?? "–"],
    ["arrived", `${clock(row.at_s)} after ${num(row.duration_s)} s`],
  ];
  return html`<h2>Episode ${nameOf(row)}${data.tokens?.is_fork ? " (a fork)" : ""}</h2>
    <p><a href=${link("r", run, "group", row.kind, row.group)}>its group side by side</a></p>
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${data.tokens && html`<${ModePicker} tokens=${data.tokens} mode=${mode} choose=${choose} />`}
    <${Body} view=${data} mode=${mode} />
    ${Object.keys(data.metrics).length > 0 &&
    html`<details><summary>metrics</summary><dl>${Object.entries(data.metrics).map(([name, value]) => html`<div><dt>${name}</dt><dd>${num(value)}</dd></div>`)}</dl></details>`}`;
}

export function GroupPage({ run, kind, group }) {
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(kind)}/${encodeURIComponent(group)}`);
  const [mode, choose] = useState("logprob");
  if (!data) return html`<${Problem} error=${error} />${!error && html`<p class="loading">Loading…</p>`}`;
  const rewards = data.episodes.map(({ row }) => row.reward).filter((reward) => reward != null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  return html`<h2>${kind === "eval" ? "Evaluation round" : "Group"} ${group}</h2>
    <p class="facts"><span>task ${data.episodes[0]?.row.task ?? "–"}</span><span>${num(data.num_episodes)} rows, mean reward ${num(mean)}</span></p>
    <${ModePicker} tokens=${data.episodes.find((view) => view.tokens)?.tokens} mode=${mode} choose=${choose} />
    <div class="side-by-side">${data.episodes.map(
      (view) => html`<article><h3><a href=${link("r", run, "episode", view.row.id)}>${nameOf(view.row)}</a> ${view.row.policy ?? ""}</h3>
        <p class="facts"><span>reward <b>${num(view.row.reward)}</b></span><span>advantage <b>${num(view.row.advantage)}</b></span><span>${endOf(view.row)}</span></p>
        <${Body} view=${view} mode=${mode} /></article>`,
    )}</div>`;
}
