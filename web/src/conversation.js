// An episode as a conversation: who said what, with reasoning folded, calls and results as blocks, and images;
// and the tree of its sequences.
import { createContext } from "preact";
import { useContext, useState } from "preact/hooks";
import { html, link, num } from "./base.js";

const FOLD = 2500;
const FIRST = 100;
const LAST = 40;
// Whether all of an episode is unfolded, because someone looks for words in it.
export const Unfolded = createContext(false);
const NAMES = { "": "reply", assistant: "earlier answer" };

export const speakersOf = (sequences) => [...new Set(sequences.flatMap(({ speaker, blocks }) => [speaker, ...blocks.map((block) => block.speaker)]).filter(Boolean))];
const hueOf = (speakers, speaker) => `s${Math.max(0, speakers.indexOf(speaker)) % 8}`;

// Text of one or more versions, with a mark where the version changes. Long text is folded.
function Text({ pieces }) {
  const [isLong, unfold] = useState(false);
  const isWhole = useContext(Unfolded) || isLong;
  const total = pieces.reduce((sum, piece) => sum + piece.text.length, 0);
  let room = isWhole || total < FOLD * 1.3 ? Infinity : FOLD;
  const parts = [];
  pieces.forEach((piece, idx) => {
    if (room <= 0) return;
    if (idx > 0 && piece.version !== pieces[idx - 1].version) parts.push(html`<span class="switch">version ${piece.version} from here</span>`);
    parts.push(html`<span class=${idx > 0 ? "later" : ""}>${piece.text.slice(0, room)}</span>`);
    room -= piece.text.length;
  });
  return html`<div class="text">${parts}${room <= 0 && html`<button class="more" onClick=${() => unfold(true)}>… all ${num(total)} characters</button>`}</div>`;
}

function Part({ part }) {
  const isUnfolded = useContext(Unfolded);
  const problem = part.problem && html`<p class="broken">${part.problem}</p>`;
  if (part.kind === "image") return part.name ? html`<img class="shown" src=${part.name} alt="an image that the model was shown" />` : problem;
  if (part.kind === "thinking") {
    const words = part.pieces.map(({ text }) => text).join("").split(/\s+/).filter(Boolean).length;
    return html`<details class="thinking" open=${isUnfolded}><summary>Thinking, ${num(words)} words${part.problem ? " (it never ended)" : ""}</summary><${Text} pieces=${part.pieces} /></details>`;
  }
  if (part.kind === "call") return html`<div class=${`call ${part.problem ? "bad" : ""}`}><b>calls ${part.name || "a tool"}</b><${Text} pieces=${part.pieces} />${problem}</div>`;
  if (part.kind === "result") return html`<div class="call"><b>result</b><${Text} pieces=${part.pieces} /></div>`;
  return html`<${Text} pieces=${part.pieces} />`;
}

function Message({ block, speakers, show }) {
  const versions = [...new Set(block.parts.flatMap(({ pieces }) => pieces.map(({ version }) => version)))].filter((version) => version >= 0);
  return html`<li class=${block.speaker ? `message said ${hueOf(speakers, block.speaker)}` : `message given ${block.role}`}>
    <div class="who"><b>${block.speaker || (NAMES[block.role] ?? block.role)}</b>
      ${block.turn > 0 && (show ? html`<button class="jump" title="shows its tokens" onClick=${() => show(block.start)}>turn ${block.turn}</button>` : html`<small>turn ${block.turn}</small>`)}
      ${versions.length > 0 && html`<small class=${versions.length > 1 ? "mixed" : ""}>version ${versions.join(" → ")}</small>`}
      ${block.reward !== 0 && html`<small>reward ${num(block.reward)}</small>`}</div>
    <div class="what">${block.parts.map((part) => html`<${Part} part=${part} />`)}${block.parts.length === 0 && html`<small>empty</small>`}</div></li>`;
}

function Messages({ blocks, speakers, show }) {
  const [isLong, unfold] = useState(false);
  const isWhole = useContext(Unfolded) || isLong;
  const draw = (block) => html`<${Message} block=${block} speakers=${speakers} show=${show} />`;
  if (isWhole || blocks.length <= FIRST + LAST) return html`<ol class="talk">${blocks.map(draw)}</ol>`;
  const num_hidden = blocks.length - FIRST - LAST;
  return html`<ol class="talk">${blocks.slice(0, FIRST).map(draw)}<li><button class="more" onClick=${() => unfold(true)}>… ${num(num_hidden)} more messages</button></li>${blocks.slice(-LAST).map(draw)}</ol>`;
}

function Sequence({ sequence, number, speakers, isChosen, isOpen, show }) {
  const { origin, num_shared } = sequence;
  const isUnfolded = useContext(Unfolded);
  return html`<details class=${`sequence ${isChosen ? "chosen" : ""}`} open=${isOpen || isChosen || isUnfolded} id=${`sequence-${sequence.id}`}>
    <summary><span class=${`key ${hueOf(speakers, sequence.speaker)}`}></span><b>${number}. ${sequence.speaker}</b> <small>${[origin.relation, `reward ${num(sequence.reward)}`].filter(Boolean).join(", ")}</small></summary>
    ${sequence.is_left_out && html`<p class="note">Its messages are too long to show beside the others. Choose it in the list above.</p>`}
    ${num_shared > 0 && html`<details class="shared-start" open=${isUnfolded}><summary>${num_shared} ${num_shared === 1 ? "message" : "messages"} as in sequence ${origin.parent + 1}</summary><${Messages} blocks=${sequence.blocks.slice(0, num_shared)} speakers=${speakers} /></details>`}
    <${Messages} blocks=${sequence.blocks.slice(num_shared)} speakers=${speakers} show=${isChosen ? show : null} /></details>`;
}

const OPEN = 6; // More sequences than this are folded, except the one that was chosen.

// `show` leads from a turn of the chosen sequence to its tokens.
export function Conversation({ sequences, id, show }) {
  const speakers = speakersOf(sequences);
  if (sequences.length === 1) return html`<${Messages} blocks=${sequences[0].blocks} speakers=${speakers} show=${show} />`;
  return sequences.map((sequence, idx) => html`<${Sequence} key=${sequence.id} sequence=${sequence} number=${idx + 1} speakers=${speakers}
    isChosen=${sequence.id === id} isOpen=${sequences.length <= OPEN} show=${show} />`);
}

// The sequences of an episode, each below the one from which it follows.
export function Tree({ run, sequences, id }) {
  if (sequences.length < 2) return null;
  const speakers = speakersOf(sequences);
  const below = (parent) => {
    const own = sequences.map((sequence, idx) => [sequence, idx]).filter(([{ origin }]) => origin.parent === parent);
    return own.length === 0 ? null : html`<ul>${own.map(([sequence, idx]) => html`<li key=${sequence.id}>
      <a href=${link("r", run, "episode", sequence.id)} aria-current=${sequence.id === id ? "true" : undefined}><span class=${`key ${hueOf(speakers, sequence.speaker)}`}></span>${idx + 1}. ${sequence.speaker}</a>
      <small>${[sequence.origin.relation, `${num(sequence.num_turns)} ${sequence.num_turns === 1 ? "turn" : "turns"}`, `${num(sequence.num_tokens)} tokens`, `reward ${num(sequence.reward)}`].filter(Boolean).join(", ")}</small>${below(idx)}</li>`)}</ul>`;
  };
  return html`<nav class="tree" aria-label="sequences of the episode"><h3>${sequences.length} sequences</h3>${below(-1)}</nav>`;
}
