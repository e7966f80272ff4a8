// The episodes of a group side by side: best and worst first, and where each leaves what it is compared with.
import { useEffect, useState } from "preact/hooks";
import { html, link, num, Problem, Skeleton, useAnswer } from "./base.js";
import { isTyping } from "./episode.js";
import { endOf, nameOf } from "./episodes.js";
import { ModePicker, TokenText } from "./token_text.js";

const WORDS = "words";
const KEPT = 120; // Characters of the common beginning that are shown.

// The sequences of each episode together, best first but the worst second; failed ones last.
function episodesOf(views) {
  const found = new Map();
  for (const view of views) {
    const key = `${view.row.episode}.${view.row.attempt}`;
    found.set(key, [...(found.get(key) ?? []), view]);
  }
  const episodes = [...found.values()].map((parts) => {
    const [{ row }] = parts;
    const reward = row.error ? null : parts.length > 1 ? (row.score ?? row.reward) : row.reward;
    return { parts, row, reward, key: `${row.episode}.${row.attempt}` };
  });
  episodes.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.row.id - b.row.id);
  const scored = episodes.filter(({ reward }) => reward != null);
  const areUnlike = scored.length > 1 && scored[0].reward > scored.at(-1).reward;
  if (!areUnlike) return { episodes, best: scored[0], worst: scored[1] ?? null, areUnlike };
  const worst = scored.at(-1);
  return { episodes: [scored[0], worst, ...episodes.slice(1).filter((each) => each !== worst)], best: scored[0], worst, areUnlike };
}

const numShared = (a, b) => {
  const most = Math.min(a.length, b.length);
  let idx = 0;
  while (idx < most && a[idx] === b[idx]) idx += 1;
  return idx;
};

// Which sequence of an episode leaves the other episode first, and after how many tokens. Null: there is nothing
// to compare; a part beyond the last one: they are equal.
function differenceOf(own, other) {
  if (!other || own === other || own.row.task !== other.row.task) return null;
  for (let part = 0; part < own.parts.length; part += 1) {
    const ids = own.parts[part].tokens?.ids;
    const theirs = other.parts[part]?.tokens?.ids ?? [];
    if (!ids) return null;
    const shared = numShared(ids, theirs);
    if (shared < ids.length || shared < theirs.length) return { part, shared };
  }
  return { part: own.parts.length, shared: 0 };
}

// Words of tokens: sampled and given ones apart.
function wordsOf(tokens, from) {
  const runs = [];
  for (let idx = from; idx < tokens.pieces.length; idx += 1) {
    const isSampled = tokens.mask[idx] === 1;
    if (runs.at(-1)?.isSampled !== isSampled) runs.push({ isSampled, text: "" });
    runs.at(-1).text += tokens.pieces[idx];
  }
  return runs;
}

function Shared({ tokens, until }) {
  const [isWhole, unfold] = useState(false);
  const text = tokens.pieces.slice(0, until).join("");
  return html`<span class="shared">${!isWhole && text.length > KEPT * 1.5 ? html`<button class="more" onClick=${() => unfold(true)}>${num(until)} tokens in common …</button>${text.slice(-KEPT)}` : text}</span>`;
}

function Words({ tokens, shared, isMarked }) {
  return html`<div class="tokens prose" tabindex="0" role="group" aria-label="what was said">${shared > 0 && html`<${Shared} tokens=${tokens} until=${shared} />`}${isMarked && html`<mark class="differs" aria-label="the first difference">▸</mark>`}${wordsOf(tokens, shared).map(
    ({ isSampled, text }) => html`<span class=${isSampled ? "" : "given"}>${text}</span>`,
  )}${isMarked && shared === tokens.pieces.length && html`<small>ends here</small>`}</div>${tokens.num_left_out > 0 && html`<p class="note">${num(tokens.num_left_out)} more tokens are not shown.</p>`}`;
}

function Body({ view, mode, shared, isMarked }) {
  return html`${view.problems.map((text) => html`<p class="note">${text}</p>`)}
    ${view.failure && html`<pre class="failure">${view.failure}</pre>`}
    ${view.tokens && (mode === WORDS ? html`<${Words} tokens=${view.tokens} shared=${shared} isMarked=${isMarked} />` : html`<${TokenText} tokens=${view.tokens} mode=${mode} from=${0} />`)}
    ${!view.tokens && view.messages.length > 0 && html`<div class="tokens prose" tabindex="0" role="group" aria-label="what was said">${view.messages.map((m) => html`<span class=${m.role === "assistant" ? "" : "given"}>${m.content}\n</span>`)}</div>`}`;
}

function Episode({ run, episode, other, otherName, words, mode, most, isChosen }) {
  const { row, parts, reward } = episode;
  const difference = differenceOf(episode, other);
  return html`<article class=${`${words} ${isChosen ? "chosen" : ""}`} id=${`member-${episode.key}`}><h3>${words && html`<span class="rank">${words}</span>`} <a href=${link("r", run, "episode", row.id)}>${nameOf(row)}</a></h3>
    <div class="bar-line">${reward == null ? html`<b>${endOf(row)}</b>` : html`<b>${num(reward)}</b><span class="bar-of"><i class=${reward < 0 ? "minus" : ""} style=${{ width: `${(100 * Math.abs(reward)) / most}%` }}></i></span>`}</div>
    <p class="facts"><span>advantage <b>${num(row.advantage)}</b></span><span>${endOf(row)}</span>${difference && html`<span>${difference.part === parts.length ? "equal to" : `${num(difference.shared)} tokens${parts.length > 1 ? ` of sequence ${difference.part + 1}` : ""} as in`} ${otherName}</span>`}</p>
    ${parts.map((view, idx) => html`${parts.length > 1 && html`<h4>${idx + 1}. ${view.row.policy}${view.row.role !== view.row.policy ? ` as ${view.row.role}` : ""}</h4>`}<${Body} view=${view} mode=${mode}
      shared=${!difference ? 0 : idx < difference.part ? view.tokens.pieces.length : idx === difference.part ? difference.shared : 0} isMarked=${difference?.part === idx && (idx > 0 || difference.shared > 0)} />`)}</article>`;
}

// What best and worst say where they part, in a sentence.
function Difference({ best, worst }) {
  const difference = differenceOf(best, worst);
  if (!difference || difference.part === best.parts.length) return null;
  const next = ({ parts }) => parts[difference.part]?.tokens?.pieces.slice(difference.shared, difference.shared + 12).join("").trim() || "nothing more";
  return html`<p class="sentence">Best and worst differ after ${num(difference.shared)} tokens${best.parts.length > 1 ? ` of sequence ${difference.part + 1}` : ""}: <q>${next(best)}</q> (${num(best.reward)}) against <q>${next(worst)}</q> (${num(worst.reward)}).</p>`;
}

function useArrows(run, episodes) {
  const [chosen, choose] = useState(-1);
  useEffect(() => {
    const press = (event) => {
      if (isTyping(event)) return;
      if (event.key === "ArrowRight") choose((old) => Math.min(episodes.length - 1, old + 1));
      if (event.key === "ArrowLeft") choose((old) => Math.max(0, old - 1));
      if (event.key === "Enter" && chosen >= 0 && event.target === document.body) location.hash = link("r", run, "episode", episodes[chosen].row.id).slice(1);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [episodes.length, chosen]);
  useEffect(() => {
    if (chosen >= 0) document.getElementById(`member-${episodes[chosen].key}`)?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  return chosen;
}

export function GroupPage({ run, kind, group }) {
  const { data, error } = useAnswer(`api/runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(kind)}/${encodeURIComponent(group)}`);
  const [mode, choose] = useState(WORDS);
  const { episodes, best, worst, areUnlike } = episodesOf(data?.episodes ?? []);
  const chosen = useArrows(run, episodes);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Skeleton} key="skeleton" />`}`;
  const rewards = episodes.map(({ reward }) => reward).filter((reward) => reward != null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const most = Math.max(1e-9, ...rewards.map(Math.abs));
  const rankOf = (episode) => (!areUnlike ? "" : episode === best ? "best" : episode === worst ? "worst" : "");
  return html`<h2>${kind === "eval" ? "Evaluation round" : "Group"} ${group}</h2>
    <p class="facts"><span>task ${kind === "eval" ? "of each episode" : (data.episodes[0]?.row.task ?? "–")}</span><span>${num(episodes.length)} episodes, mean reward ${num(mean)}</span>${data.num_episodes > data.episodes.length && html`<span>${num(data.num_episodes - data.episodes.length)} more are not shown</span>`}</p>
    ${areUnlike ? html`<${Difference} best=${best} worst=${worst} />` : rewards.length > 1 && html`<p class="sentence">All rewards are equal, so the group says nothing about which answer is better.</p>`}
    <${ModePicker} tokens=${data.episodes.find((view) => view.tokens)?.tokens} mode=${mode} choose=${choose} words="show" others=${[WORDS]} />
    <div class="side-by-side">${episodes.map((episode, idx) => html`<${Episode} key=${episode.key} run=${run} episode=${episode} other=${episode === best ? worst : best} otherName=${!areUnlike ? nameOf((episode === best ? worst : best)?.row ?? episode.row) : episode === best ? "the worst" : "the best"} words=${rankOf(episode)} mode=${mode} most=${most} isChosen=${idx === chosen} />`)}</div>`;
}
