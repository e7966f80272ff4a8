// One episode: what it was rewarded for, its conversation, its tokens, and the episodes of its group.
import { useEffect, useRef, useState } from "preact/hooks";
import { clock, download, html, link, num, Problem, query, Skeleton, useAnswer } from "./base.js";
import { Conversation, Tree, Unfolded } from "./conversation.js";
import { endOf, nameOf, versionsOf } from "./episodes.js";
import { Find, keepWords, keptWords } from "./find.js";
import { ModePicker, TokenText } from "./token_text.js";

export const isTyping = (event) => event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
const pathOf = (run, id) => link("r", run, "episode", id);

// What j and k lead to: the neighbours in the list that was open last, else the older and the newer episode.
function neighboursOf(run, id, view) {
  const ids = (sessionStorage.getItem(`astraflow-list ${run}`) ?? "").split(",");
  const at = ids.indexOf(String(id));
  if (at >= 0) return { j: ids[at + 1], k: ids[at - 1] };
  return String(view.row.id) === String(id) ? { j: view.place.older, k: view.place.newer } : {};
}

function useKeys(run, view) {
  useEffect(() => {
    if (!view) return undefined;
    const { siblings } = view.place;
    const at = siblings.findIndex((each) => each.id === view.row.id - view.row.part);
    const press = (event) => {
      if (isTyping(event) || event.target.closest?.(".scroll")) return;
      // Keys may come faster than pages, so the link says which episode is open.
      const id = location.hash.split("/").at(-1);
      const arrows = id === String(view.row.id) ? { ArrowLeft: siblings[at - 1]?.id, ArrowRight: siblings[at + 1]?.id } : {};
      const next = { ...neighboursOf(run, id, view), ...arrows }[event.key];
      if (next) location.hash = pathOf(run, next).slice(1);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [run, view]);
}

// The rewards of the group as bars, each of which leads to its episode.
function Strip({ run, view }) {
  const { siblings, num_siblings } = view.place;
  const { row } = view;
  const most = Math.max(1e-9, ...siblings.map(({ reward }) => Math.abs(reward ?? 0)));
  return html`<nav class="strip" aria-label="episodes of the group">
    ${siblings.length > 1 && html`<ul>${siblings.map(({ id, name, reward, has_error }) => html`<li key=${id}><a href=${pathOf(run, id)} aria-current=${id === row.id - row.part ? "true" : undefined}
      title=${has_error ? `${name} failed` : `${name}, reward ${num(reward)}`} aria-label=${has_error ? `episode ${name} failed` : `episode ${name}, reward ${num(reward)}`}><i class=${has_error ? "bad" : reward < 0 ? "minus" : ""} style=${{ height: `${Math.max(2, Math.round((30 * Math.abs(reward ?? 0)) / most))}px` }}></i></a></li>`)}</ul>`}
    <span><a href=${link("r", run, "group", row.kind, row.group)}>its group side by side</a>${num_siblings > siblings.length ? ` (${num(num_siblings)} episodes)` : ""}</span></nav>`;
}

const STATES = { trained: "good", failed: "bad" };

function Verdict({ view }) {
  const { row } = view;
  const look = row.error ? "bad" : row.reward > 0 ? "good" : "warn";
  const facts = [
    ["policy", `${row.policy ?? "–"}${row.role && row.role !== row.policy ? ` as ${row.role}` : ""}`],
    ["task", row.task ?? "–"],
    ["version", versionsOf(row)],
    ["tokens", row.tokens == null ? "–" : `${num(row.tokens)}, ${num(row.trained_tokens)} trained`],
    ["end", endOf(row) || "–"],
    ["step", row.step == null ? "–" : `${row.step}, staleness ${row.staleness}`],
  ].filter(([, value]) => value !== "–");
  return html`<section class=${`verdict ${look}`} aria-label="reward"><p class="sentence">${view.reward_said}</p>
    ${view.versions_said && html`<p class="versions">${view.versions_said}</p>`}
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd class=${name === "end" ? (STATES[row.fate] ?? "") : ""}>${value}</dd></div>`)}</dl></section>`;
}

function AllFacts({ run, view }) {
  const { row } = view;
  const facts = [
    ["task", html`<a href=${`${link("r", run, "episodes")}?${query({ task: row.task ?? "" })}`}>${row.task ?? "–"}</a> (all versions)`],
    ["reward", num(row.reward)],
    ["score", num(row.score)],
    ["advantage", num(row.advantage)],
    ["turns", num(row.turns)],
    ["service", row.worker ?? "–"],
    ["arrived", `${clock(row.at_s)} after ${num(row.duration_s)} s`],
    ...Object.entries(view.metrics).map(([name, value]) => [name, num(value)]),
  ];
  return html`<details class="all-facts"><summary>All facts and metrics</summary><dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></details>`;
}

function Head({ run, view }) {
  const { row } = view;
  const { j, k } = neighboursOf(run, row.id, view);
  const [problem, setProblem] = useState(null);
  const save = () => {
    setProblem(null);
    download(`api/runs/${encodeURIComponent(run)}/episodes/${row.id}/file`, `${run}-${nameOf(row).replace("/", "-")}.html`).catch((error) => setProblem(error.message));
  };
  return html`<div class="episode-head"><h2>Episode ${nameOf(row)}${view.tokens?.is_fork ? " (a fork)" : ""}</h2>
    <p class="facts">${k ? html`<a class="chip" href=${pathOf(run, k)}>k ↑</a>` : html`<span class="chip off">k ↑</span>`}${j ? html`<a class="chip" href=${pathOf(run, j)}>j ↓</a>` : html`<span class="chip off">j ↓</span>`}<button onClick=${save}>Save as file</button></p></div>
    <${Problem} error=${problem} />`;
}

// What was said, and a field that finds words in it.
function Talk({ run, view, show }) {
  const box = useRef(null);
  const [words, setWords] = useState(() => keptWords(run));
  const look = (text) => {
    keepWords(run, text);
    setWords(text);
  };
  const says = view.sequences.some(({ blocks, is_left_out }) => blocks.length > 0 || is_left_out);
  return html`<section aria-label="conversation"><div class="head"><h3>Conversation</h3>${says && html`<${Find} box=${box} words=${words} change=${look} content=${view} />`}</div>
    <div ref=${box}><${Unfolded.Provider} value=${words !== ""}>${says ? html`<${Conversation} sequences=${view.sequences} id=${view.row.id} show=${view.tokens ? show : null} />` : html`<p class="empty">Nothing that was said is stored.</p>`}</${Unfolded.Provider}></div></section>`;
}

function Tokens({ view, place }) {
  const [mode, choose] = useState("logprob");
  if (!view.tokens) return html`<p class="muted">No tokens are stored${view.row.kind === "eval" ? ": evaluations keep messages only" : ""}.</p>`;
  return html`<${ModePicker} tokens=${view.tokens} mode=${mode} choose=${choose} /><${TokenText} key=${view.row.id} tokens=${view.tokens} mode=${mode} place=${place} />`;
}

export function EpisodePage({ run, id }) {
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}/episodes/${encodeURIComponent(id)}`);
  const [kept, keep] = useState(null);
  const [place, show] = useState(null);
  // The episode before stays until the next one is here, so that nothing flashes while one goes through a list.
  const view = data ?? (error ? null : kept);
  useKeys(run, view ?? kept);
  useEffect(() => {
    if (!data) return;
    const isOther = kept && kept.row.id - kept.row.part !== data.row.id - data.row.part;
    keep(data);
    show(null);
    if (isOther) window.scrollTo(0, 0);
    else if (kept && data.sequences.length > 1) document.getElementById(`sequence-${data.row.id}`)?.scrollIntoView({ block: "nearest" });
  }, [data]);
  if (!view) {
    return error ? html`<div class="empty"><p>This episode can't be shown: ${error}</p><p><a href=${link("r", run, "episodes")}>All episodes of the run</a></p></div>` : html`<${Skeleton} key="skeleton" />`;
  }
  return html`<${Head} key=${view.row.id} run=${run} view=${view} />
    <${Verdict} view=${view} />
    <${Strip} run=${run} view=${view} />
    ${view.problems.map((text) => html`<p class="note">${text}</p>`)}
    ${view.failure && html`<pre class="failure">${view.failure}</pre>`}
    <${Tree} run=${run} sequences=${view.sequences} id=${view.row.id} />
    <div class=${view.tokens ? "columns" : ""}>
      <${Talk} run=${run} view=${view} show=${(at) => show({ at })} />
      <section class="beside" aria-label="tokens"><h3>Tokens</h3><${Tokens} view=${view} place=${place} /></section></div>
    <${AllFacts} run=${run} view=${view} />`;
}
