// What happened in a run, by kind and grouped by step: the newest first, the rest on demand.
import { useMemo, useState } from "preact/hooks";
import { clock, html } from "./base.js";

const WORDS = { take: "took a batch", commit: "committed", publish: "published", join: "joined", leave: "left", eval: "evaluated", "set aside": "set aside", restored: "restored", end: "ended", resume: "resumed", schedule: "schedule changed", drop: "batch dropped", redo: "step repeated", restart: "restarted" };
const LOOKS = { leave: "warn", restart: "warn", "set aside": "bad", drop: "bad", redo: "warn", eval: "good", join: "good", restored: "good" };

// Title of a chip, and the kinds of events behind it.
const CHIPS = [
  ["Everything", null],
  ["Services restarted", ["restart", "restored", "set aside"]],
  ["Joined or left", ["join", "leave"]],
  ["Evaluations", ["eval"]],
];

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
  const [chip, choose] = useState("Everything");
  const kinds = Object.fromEntries(CHIPS)[chip];
  const groups = useMemo(() => byStep([...(happenings ?? [])].reverse().filter((event) => !kinds || kinds.includes(event.kind))), [happenings, chip]);
  const shown = isAll ? groups : groups.slice(0, 8);
  const count = (of) => happenings.filter((event) => of.includes(event.kind)).length;
  return html`<section><h2>What happened</h2>
    ${!happenings && html`<p class="muted">Reading the journal…</p>`}
    ${happenings?.length > 0 && html`<div class="chips" role="group" aria-label="kinds of events">${CHIPS.map(([title, of]) => html`<button class="chip" aria-pressed=${title === chip} onClick=${() => choose(title)}>
      ${title}${of && html` <small>${count(of)}</small>`}</button>`)}</div>`}
    ${happenings && groups.length === 0 && html`<p class="empty">${kinds && kinds.includes("restart") ? "No service was restarted." : "Nothing of this kind."}</p>`}
    <ol class="events">${shown.map((group) => html`<li><b class="step">${group.step ? `step ${group.step}` : "start"}</b>
      <ul>${[...group.events].reverse().map((event) => html`<li><time>${clock(event.at_s)}</time> <span class=${`dot ${LOOKS[event.kind] ?? ""}`}></span>
        <b>${event.who}</b> ${WORDS[event.kind] ?? event.kind}${event.version != null ? ` (version ${event.version})` : ""}${event.text && ` · ${event.text}`}</li>`)}</ul></li>`)}</ol>
    ${groups.length > 8 && html`<button onClick=${() => showAll(!isAll)}>${isAll ? "Fewer" : `All ${groups.length} steps with events`}</button>`}</section>`;
}
