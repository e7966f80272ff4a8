// The frame: which page the link names, navigation, theme, and the token of a remote viewer.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { html, link, Problem, token, useAnswer } from "./base.js";
import { EpisodePage, GroupPage } from "./episode.js";
import { EpisodesPage } from "./episodes.js";
import { ComparePage, TimelinePage, WeightsPage } from "./others.js";
import { RunPage } from "./run.js";

const TABS = [["run", "Run"], ["episodes", "Episodes"], ["weights", "Weights"], ["timeline", "Timeline"]];

function place() {
  const [path, search = ""] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, params: new URLSearchParams(search) };
}

function usePlace() {
  const [at, setAt] = useState(place());
  useEffect(() => {
    const change = () => setAt(place());
    window.addEventListener("hashchange", change);
    return () => window.removeEventListener("hashchange", change);
  }, []);
  return at;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("astraflow-theme") ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("astraflow-theme", theme);
  }, [theme]);
  return html`<label class="theme"><span class="sr">theme</span><select value=${theme} onChange=${(event) => setTheme(event.target.value)}>
    <option value="">system</option><option value="light">light</option><option value="dark">dark</option></select></label>`;
}

function TokenForm() {
  const [text, setText] = useState("");
  const save = (event) => {
    event.preventDefault();
    token.set(text.trim());
    location.reload();
  };
  return html`<form class="token" onSubmit=${save}><p>This viewer is reached over a network and needs its token, which it printed when it was started.</p>
    <label>token <input type="password" autocomplete="off" value=${text} onInput=${(event) => setText(event.target.value)} /></label><button>Show the runs</button></form>`;
}

function RunList({ runs }) {
  return html`<h1>Runs</h1>${runs.length === 0 && html`<p>No run folder was found.</p>`}
    <ul class="runs">${runs.map((run) => html`<li><a href=${link("r", run.name, "run")}>${run.name}</a> <span class=${`state ${run.state}`}>${run.state}</span> <small>${run.path}</small></li>`)}</ul>`;
}

function Page({ runs, parts, params }) {
  if (parts[0] === "compare") return html`<h1>Compare</h1><${ComparePage} all=${runs} params=${params} />`;
  if (parts[0] !== "r") return html`<${RunList} runs=${runs} />`;
  const [, run, page = "run", ...rest] = parts;
  const isShown = runs.some(({ name }) => name === run);
  const pages = {
    run: () => html`<${RunPage} key=${run} run=${run} />`,
    episodes: () => html`<${EpisodesPage} key=${run} run=${run} params=${params} />`,
    episode: () => html`<${EpisodePage} run=${run} id=${rest[0] ?? ""} />`,
    group: () => html`<${GroupPage} run=${run} kind=${rest[0] ?? ""} group=${rest[1] ?? ""} />`,
    weights: () => html`<${WeightsPage} run=${run} />`,
    timeline: () => html`<${TimelinePage} key=${run} run=${run} />`,
  };
  const active = { episode: "episodes", group: "episodes" }[page] ?? page;
  return html`<h1>${run}</h1>
    <nav aria-label="pages of the run" class="tabs">${TABS.map(
      ([name, title]) => html`<a href=${link("r", run, name)} aria-current=${name === active ? "page" : undefined}>${title}</a>`,
    )}</nav>
    ${isShown && pages[page] ? pages[page]() : html`<p class="problem">There is no such page here.</p>`}`;
}

function App() {
  const { parts, params } = usePlace();
  const { data: runs, error } = useAnswer("api/runs", 5000);
  const [isLocked, lock] = useState(false);
  useEffect(() => {
    const needs = () => lock(true);
    window.addEventListener("needs-token", needs);
    return () => window.removeEventListener("needs-token", needs);
  }, []);
  useEffect(() => {
    if (runs?.length === 1 && parts.length === 0) location.replace(link("r", runs[0].name, "run"));
    document.title = parts[1] ? `${parts[1]} · AstraFlow` : "AstraFlow";
  }, [runs, parts]);
  return html`<header><a class="brand" href="#/"><img src="assets/icon.svg" alt="" width="24" height="24" />AstraFlow</a><nav aria-label="main"><a href="#/">Runs</a><a href="#/compare">Compare</a></nav><${Theme} /></header>
    <main>${isLocked ? html`<${TokenForm} />` : html`<${Problem} error=${error} />${runs ? html`<${Page} runs=${runs} parts=${parts} params=${params} />` : html`<p class="loading">Loading…</p>`}`}</main>`;
}

document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
