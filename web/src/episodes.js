// Finding episodes: filters in the link, results newest first, export of the selection.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { askJson, download, html, link, num, Problem, query, useAnswer } from "./base.js";
import { keepWords, Marked } from "./find.js";
import { Icon } from "./icons.js";

const FIELDS = [
  ["policy", "policy", "policy"],
  ["kind", "kind", ["train", "eval"]],
  ["fate", "fate", ["live", "trained", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"]],
  ["finish", "end", ["stop", "length", "abort"]],
  ["error", "error", "error"],
  ["worker", "service", "worker"],
  ["task", "task", "sums/17 or sums/*"],
  ["group", "group", ""],
  ["reward", "reward", "0..0.5"],
  ["advantage", "advantage", "1.."],
  ["version", "version", "10..20"],
  ["step", "step", "12"],
  ["tokens", "tokens", "..512"],
];
const NAMES = [...FIELDS.map(([name]) => name), "text"];
const LIMIT = 50;

function Field({ name, label, kind, choices, value, change }) {
  const set = (event) => change(name, event.target.value.trim());
  const isChoice = Array.isArray(kind) || choices[kind];
  if (isChoice) {
    const names = Array.isArray(kind) ? kind : [...(kind === "error" ? ["any", "none"] : []), ...choices[kind]];
    return html`<label>${label}<select value=${value} onChange=${set}><option value="">any</option>
      ${names.map((each) => html`<option value=${each} selected=${each === value}>${each}</option>`)}</select></label>`;
  }
  return html`<label>${label}<input value=${value} placeholder=${kind} onChange=${set} /></label>`;
}

export function EpisodesPage({ run, params }) {
  const base = `api/runs/${encodeURIComponent(run)}`;
  const filters = Object.fromEntries(NAMES.map((name) => [name, params.get(name) ?? ""]));
  keepWords(run, filters.text);
  const key = query(filters);
  const [found, setFound] = useState({ key: null, rows: [], matches: {}, next: null, total: 0, error: null });
  const [turn, setTurn] = useState(0);
  const [problem, setProblem] = useState(null);
  const isEmpty = found.key === key && found.rows.length === 0;
  const { data: overview } = useAnswer(`${base}/index`, isEmpty ? 2000 : 10_000);
  // An index that is being filled, or a run that has just begun, may have what was sought a moment later.
  useEffect(() => {
    if (isEmpty && overview?.num_episodes > found.total) setTurn((old) => old + 1);
  }, [isEmpty, overview?.num_episodes]);

  const search = async (old, signal) => {
    // A search goes on in parts until a page is full; each part is one short question.
    let { rows, matches, next } = old;
    const wanted = rows.length + LIMIT;
    do {
      const before = next == null ? {} : { before: next };
      const part = await askJson(`${base}/episodes?${query({ ...filters, ...before, limit: wanted - rows.length })}`, signal);
      rows = [...rows, ...part.rows];
      matches = { ...matches, ...part.matches };
      next = part.next_before;
      setFound({ key, rows, matches, next, total: part.num_episodes, error: null });
    } while (next != null && rows.length < wanted && !signal.aborted);
  };
  useEffect(() => {
    const stop = new AbortController();
    search({ rows: [], matches: {}, next: null }, stop.signal).catch(
      (error) => stop.signal.aborted || setFound({ key, rows: [], matches: {}, next: null, total: 0, error: error.message }),
    );
    return () => stop.abort();
  }, [run, key, turn]);

  const change = (name, value) => {
    location.hash = `${link("r", run, "episodes").slice(1)}?${query({ ...filters, [name]: value })}`;
  };
  const more = () => search(found, new AbortController().signal).catch((error) => setProblem(error.message));
  const save = (form) => download(`${base}/export?${query({ ...filters, form })}`, `${run}.${form}`).catch((error) => setProblem(error.message));
  const readyName = params.get("ready") ?? "";
  // Asked again while it may find what was not there yet. After that, the list stays as it is.
  const [isSettled, settle] = useState(false);
  const { data: ready, error: readyError } = useAnswer(readyName ? `${base}/ready/${encodeURIComponent(readyName)}` : "", isSettled ? 0 : 2000);
  useEffect(() => settle(overview?.is_complete === true && ready?.length > 0), [overview?.is_complete, ready]);
  // The rows before stay until the next ones are here, so that nothing jumps.
  const shown = useRef([]);
  shown.current = (readyName ? ready : found.rows) ?? shown.current;
  // What is below the list comes with its first page, which would push it away. A search for words fills a page slowly.
  const isBegun = useRef(false);
  const isFull = found.key === key && (found.next == null || found.rows.length >= LIMIT || found.error != null);
  isBegun.current = (isBegun.current && !filters.text) || (readyName ? ready != null || readyError != null : isFull);
  return html`
    <${Search} words=${filters.text} change=${(words) => change("text", words)} found=${found.key === key ? found : null} />
    <${Steps} step=${filters.step} change=${(step) => change("step", step)} />
    <${Searches} run=${run} chosen=${readyName} hasFilters=${key !== ""} />
    <${Chips} run=${run} filters=${filters} />
    <${Problem} error=${readyName ? readyError : null} />
    <${Cards} run=${run} rows=${shown.current} matches=${readyName ? {} : found.matches} words=${filters.text} isDone=${(readyName ? ready != null : isFull) && (overview?.is_complete ?? true)} />
    ${!readyName && isBegun.current && found.next != null && html`<p><button onClick=${more}>Older ones</button></p>`}
    ${isBegun.current && html`<details open=${key !== ""}><summary>All filters, table, and export</summary>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      ${FIELDS.map(
        ([name, label, kind]) =>
          html`<${Field} key=${name} name=${name} label=${label} kind=${kind} value=${filters[name]} change=${change}
            choices=${overview?.choices ?? { policy: [], worker: [], error: [], role: [] }} />`,
      )}
    </form>
    <p class="facts">
      <span role="status">${found.rows.length} found${found.next != null ? `, searched back to ${num(found.next)}` : ""} of ${num(found.total)}</span>
      <button onClick=${() => setTurn(turn + 1)}>Refresh</button>
      <button onClick=${() => save("jsonl")}>JSONL</button>
      <button onClick=${() => save("parquet")}>Parquet</button>
      ${key && html`<a href=${link("r", run, "episodes")}>clear filters</a>`}
    </p>
    <${Problem} error=${found.error ?? problem} />
    ${overview && !overview.is_complete && html`<p class="note">The index is being filled; ${num(overview.num_episodes)} episodes so far.</p>`}
    <${Table} run=${run} rows=${found.rows} /></details>`}`;
}

// Words in anything that was said, newest first. A long run is searched piece by piece, so the page says how far it is.
function Search({ words, change, found }) {
  const send = (event) => {
    event.preventDefault();
    change(new FormData(event.target).get("words").trim());
  };
  const isOn = words && found;
  const how = isOn && `${num(found.rows.length)} found${found.next == null ? "" : `, back to ${num(found.next)}`} of ${num(found.total)}`;
  return html`<form class="search" role="search" onSubmit=${send}><input type="search" name="words" key=${words} defaultValue=${words} placeholder="Search what was said" aria-label="Search what was said" maxlength="1000" />
    <button><${Icon} name="search" />Search</button><span class="muted n" role="status">${how}</span></form>`;
}

// The episodes that a step trained on, with the steps next to it.
function Steps({ step, change }) {
  if (!/^\d{1,9}$/.test(step)) return null;
  const at = Number(step);
  return html`<div class="chips" role="group" aria-label="step"><span class="name">step</span>
    <button class="chip" disabled=${at <= 1} onClick=${() => change(String(at - 1))}>${at > 1 ? `← ${num(at - 1)}` : "first"}</button>
    <button class="chip" aria-pressed="true" title="Shows all steps" onClick=${() => change("")}>${num(at)} ×</button>
    <button class="chip" onClick=${() => change(String(at + 1))}>${num(at + 1)} →</button></div>`;
}

const SEARCHES = [["", "Newest"], ["improved", "Most improved"], ["worst", "Most often wrong"], ["longest", "Longest"], ["strange", "Newest strange"], ["versions", "Across versions"], ["discarded", "Discarded"]];

function Searches({ run, chosen, hasFilters }) {
  return html`<nav class="chips" aria-label="ready searches">${SEARCHES.map(
    ([name, words]) => html`<a class="chip" href=${`${link("r", run, "episodes")}${name ? `?ready=${name}` : ""}`}
      aria-current=${name === chosen && !(hasFilters && name === "") ? "true" : undefined}>${words}</a>`,
  )}</nav>`;
}

// Filters as chips, with how many of the newest episodes each has.
const SHOWN = [["kind", "kind"], ["fate", "fate"], ["reward", "reward"], ["finish", "end"], ["error", "error"]];
const ALWAYS = 4;
const REWARDS = { "..0": "0 or less", "0.000001..0.999999": "between", "1..": "1 or more" };

function Chips({ run, filters }) {
  const { data } = useAnswer(`api/runs/${encodeURIComponent(run)}/facets?${query(filters)}`, 10000);
  // These rows are always there, so that the list below stays where it is.
  if (!data) return html`<div class="facets">${SHOWN.slice(0, ALWAYS).map(([column, label]) => html`<div class="chips" key=${column}><span class="name">${label}</span><span class="chip">…</span></div>`)}</div>`;
  return html`<div class="facets" title=${`Counts of the newest ${num(data.num_counted)} episodes`}>${SHOWN.filter(([column], idx) => idx < ALWAYS || data.counts[column].length > 0 || filters[column]).map(
    ([column, label]) => html`<div class="chips" key=${column}><span class="name">${label}</span>${data.counts[column].map(([value, count]) => {
      const isOn = filters[column] === value;
      return html`<a class="chip" key=${value} aria-current=${isOn ? "true" : undefined}
        href=${`${link("r", run, "episodes")}?${query({ ...filters, [column]: isOn ? "" : value })}`}>${column === "reward" ? REWARDS[value] : value} <small>${num(count)}</small></a>`;
    })}${data.counts[column].length === 0 && html`<span class="chip off">none</span>`}</div>`,
  )}</div>`;
}

// Episodes with their words; j and k move, Enter opens.
function Cards({ run, rows, matches, words: sought, isDone }) {
  const [chosen, choose] = useState(-1);
  const ids = useMemo(() => rows.map(({ id }) => id).slice(0, 200).join(","), [rows]);
  const { data: words } = useAnswer(ids ? `api/runs/${encodeURIComponent(run)}/snippets?ids=${ids}` : "");
  useEffect(() => {
    sessionStorage.setItem(`astraflow-list ${run}`, ids);
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      if (event.key === "j") choose((old) => Math.min(rows.length - 1, old + 1));
      if (event.key === "k") choose((old) => Math.max(0, old - 1));
      if (event.key === "Enter" && chosen >= 0 && event.target === document.body) location.hash = link("r", run, "episode", rows[chosen].id).slice(1);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [ids, chosen]);
  useEffect(() => document.querySelector(".cards .chosen")?.scrollIntoView({ block: "nearest" }), [chosen]);
  if (rows.length === 0) return html`<p class="empty">${isDone ? "No episode matches." : "Searching…"}</p>`;
  return html`<ul class="cards">${rows.map((row, idx) => {
    const said = words?.[row.id];
    const look = row.error ? "error" : row.kind === "eval" ? "eval" : (row.fate ?? "live");
    const isSame = isOfSame(rows[idx - 1], row);
    return html`<li key=${row.id} class=${idx === chosen ? "chosen" : ""}><span class=${`fate ${look}`} title=${endOf(row)}></span>
      <div><div class=${`words ${isSame ? "same" : ""}`}>${!isSame && html`<div class="asked">${said?.asked ?? ""}</div>`}<div>${matches[row.id] ? html`<${Marked} text=${matches[row.id]} words=${sought} />` : (said?.answered ?? "")}</div></div>
        <p class="facts"><a href=${link("r", run, "episode", row.id)}>${nameOf(row)}</a>${[row.task, row.tokens != null && `${num(row.tokens)} tokens`, endOf(row), `version ${versionsOf(row)}`].filter(Boolean).map((text) => html`<span>${text}</span>`)}${row.note && html`<b>${row.note}</b>`}</p></div>
      <div class="reward">${row.reward == null ? "" : html`${num(row.reward)}<meter min="0" max="1" value=${Math.max(0, Math.min(1, row.reward))} aria-label="reward"></meter>`}</div></li>`;
  })}</ul>`;
}

// Whether the row above is of the same group, so that it shows the same question.
const isOfSame = (above, row) => above != null && ["kind", "group", "policy", "part"].every((name) => above[name] === row[name]);

export const nameOf = (row) => `${row.kind === "eval" ? "e" : ""}${row.group}.${row.episode}.${row.attempt}${row.part ? `/${row.part}` : ""}`;
export const versionsOf = (row) =>
  row.oldest_version === row.newest_version ? num(row.newest_version) : `${row.oldest_version}–${row.newest_version}`;
export const endOf = (row) => row.error ?? [row.finish, row.fate ?? (row.kind === "train" ? "live" : "")].filter(Boolean).join(", ");

export function Table({ run, rows }) {
  return html`<div class="scroll" tabindex="0" role="group" aria-label="episodes"><table>
    <thead><tr><th>episode</th><th>task</th><th>policy</th><th>version</th><th class="n">reward</th><th class="n">advantage</th>
      <th class="n">tokens</th><th>end</th><th class="n">step</th><th>service</th></tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr class=${row.error ? "bad" : ""}>
        <td><a href=${link("r", run, "episode", row.id)}>${nameOf(row)}</a></td>
        <td><a href=${`${link("r", run, "episodes")}?${query({ task: row.task ?? "" })}`}>${row.task ?? ""}</a></td>
        <td>${row.policy ?? ""}${row.role && row.role !== row.policy ? ` as ${row.role}` : ""}</td>
        <td>${versionsOf(row)}</td><td class="n">${num(row.reward)}</td><td class="n">${num(row.advantage)}</td>
        <td class="n">${num(row.tokens)}</td><td>${endOf(row)}</td><td class="n">${num(row.step)}</td><td>${row.worker ?? ""}</td></tr>`,
    )}</tbody></table></div>`;
}
