// What happened in a run: the unusual first, grouped by step; the rest on demand.
import { useMemo, useState } from "preact/hooks";
import { clock, html } from "./base.js";

const WORDS = { join: "joined", leave: "left", eval: "evaluated", "set aside": "set aside", restored: "restored", end: "run ended", resume: "run resumed", schedule: "schedule changed", drop: "batch dropped", redo: "step repeated", restart: "restarted" };
const LOOKS = { leave: "warn", restart: "warn", "set aside": "bad", drop: "bad", redo: "warn", eval: "good", join: "good", restored: "good" };

// A service that joins again under its name was restarted.
function withRestarts(oldestFirst) {
  const seen = new Set();
  return oldestFirst.map((event) => {
    if (event.kind !== "join") return event;
    const name = event.who.replace(/\.[0-9a-f]+$/, "");
    const isAgain = seen.has(name);
    seen.add(name);
    return { ...event, who: name, kind: isAgain ? "restart" : "join" };
  });
}

function byStep(events) {
  const groups = [];
  let step = 0;
  for (const event of events) {
    step = event.step ?? step;
    if (groups.at(-1)?.step !== step) groups.push({ step, events: [] });
    groups.at(-1).events.push(event);
  }
  return groups.reverse();
}

export function Events({ happenings }) {
  const [isAll, showAll] = useState(false);
  const groups = useMemo(() => byStep(withRestarts([...(happenings ?? [])].reverse())), [happenings]);
  const shown = isAll ? groups : groups.slice(0, 8);
  return html`<section><h2>What happened</h2>
    ${!happenings && html`<p class="muted">Reading the journal…</p>`}
    ${happenings?.length === 0 && html`<p class="empty">Nothing unusual.</p>`}
    <ol class="events">${shown.map((group) => html`<li><b class="step">${group.step ? `step ${group.step}` : "start"}</b>
      <ul>${[...group.events].reverse().map((event) => html`<li><time>${clock(event.at_s)}</time> <span class=${`dot ${LOOKS[event.kind] ?? ""}`}></span>
        <b>${event.who}</b> ${WORDS[event.kind] ?? event.kind}${event.version != null ? ` (version ${event.version})` : ""} ${event.text}</li>`)}</ul></li>`)}</ol>
    ${groups.length > 8 && html`<button onClick=${() => showAll(!isAll)}>${isAll ? "Fewer" : `All ${groups.length} steps with events`}</button>`}</section>`;
}
