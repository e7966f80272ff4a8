// The frame: which page the link names, navigation, theme, and the token of a remote viewer.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ANSWERS, clock, html, link, Problem, Skeleton, token, useAnswer } from "./base.js";
import { ComparePage } from "./compare.js";
import { EpisodePage } from "./episode.js";
import { GroupPage } from "./episode_group.js";
import { EpisodesPage } from "./episodes.js";
import { SweepPage } from "./groups.js";
import logo from "./icon.svg";
import { Icon } from "./icons.js";
import { TimelinePage, WeightsPage } from "./others.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

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

const THEMES = ["", "light", "dark"];

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("astraflow-theme") ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("astraflow-theme", theme);
    window.dispatchEvent(new Event("theme"));
  }, [theme]);
  const name = theme || "system";
  const next = () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  return html`<button class="plain" onClick=${next} title=${`Colors: ${name}`} aria-label=${`Colors: ${name}. Change them`}><${Icon} name=${name} /></button>`;
}

// One line while the viewer doesn't answer; the pages stay as they are.
function Away() {
  const [since, set] = useState(0);
  useEffect(() => {
    const change = ({ detail }) => set((old) => (detail.isAway ? old || Date.now() / 1000 : 0));
    window.addEventListener("viewer", change);
    return () => window.removeEventListener("viewer", change);
  }, []);
  return since > 0 && html`<p class="away" role="status"><${Icon} name="away" />The viewer hasn't answered since ${clock(since)}. You see what it said last; this page tries again.</p>`;
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

function Page({ runs, parts, params }) {
  const known = useRef(new Set());
  runs.forEach(({ name }) => known.current.add(name));
  if (parts[0] === "compare") return html`<h1>Compare</h1><${ComparePage} all=${runs} params=${params} />`;
  if (parts[0] === "sweep") return html`<${SweepPage} key=${parts[1]} name=${parts[1] ?? ""} />`;
  if (parts[0] !== "r") return html`<${RunsPage} runs=${runs} />`;
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
  if (!known.current.has(run) || !pages[page]) {
    return html`<h1>${run}</h1><p class="empty"><b>There is no such page here</b>The run may have been moved or deleted. <a href="#/">See all runs</a></p>`;
  }
  return html`<h1>${run}</h1>
    <nav aria-label="pages of the run" class="tabs">${TABS.map(
      ([name, title]) => html`<a href=${link("r", run, name)} aria-current=${name === active ? "page" : undefined}>${title}</a>`,
    )}</nav>
    ${!isShown && html`<p class="note" role="status">The folder of this run is gone: it was deleted or moved. You see what was read last.</p>`}
    ${pages[page]()}`;
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
    if (runs?.length === 1 && !runs[0].sweep && parts.length === 0) location.replace(link("r", runs[0].name, "run"));
    document.title = parts[1] ? `${parts[1]} · AstraFlow` : "AstraFlow";
  }, [runs, parts]);
  return html`<header><a class="brand" href="#/"><img src=${logo} alt="" width="22" height="22" />AstraFlow</a><nav aria-label="main"><a href="#/">Runs</a><a href="#/compare">Compare</a></nav><${Theme} /></header>
    <${Away} /><main>${isLocked ? html`<${TokenForm} />` : html`<${Problem} error=${error} />${runs ? html`<${Page} runs=${runs} parts=${parts} params=${params} />` : html`<h1>\u00a0</h1><${Skeleton} />`}`}</main>`;
}

if (ANSWERS && !location.hash) location.replace(ANSWERS.start);
document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
