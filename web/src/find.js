// Words that someone looks for: kept from the list to the episode, marked in a line of text, and found on a page.
import { useEffect, useState } from "preact/hooks";
import { html, num } from "./base.js";
import { Icon } from "./icons.js";

const keyOf = (run) => `astraflow-words ${run}`;
const MOST = 5000;

export const keptWords = (run) => sessionStorage.getItem(keyOf(run)) ?? "";
export const keepWords = (run, words) => sessionStorage.setItem(keyOf(run), words);

const placeOf = (text, words, from = 0) => text.toLowerCase().indexOf(words.toLowerCase(), from);

// A line of text with the words marked where they first are.
export function Marked({ text, words }) {
  const at = words ? placeOf(text, words) : -1;
  if (at < 0) return text;
  return html`${text.slice(0, at)}<mark>${text.slice(at, at + words.length)}</mark>${text.slice(at + words.length)}`;
}

// The texts below an element, each as its nodes: what marks a text, such as a new version in it, is no part of it.
function textsIn(box) {
  const texts = new Map();
  const nodes = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  while (nodes.nextNode()) {
    const around = nodes.currentNode.parentElement;
    if (around.closest(".switch, .more, .who")) continue;
    const text = around.closest(".text") ?? around;
    texts.set(text, [...(texts.get(text) ?? []), nodes.currentNode]);
  }
  return [...texts.values()];
}

// Where the words are in the texts below an element.
function rangesOf(box, words) {
  const found = [];
  for (const nodes of textsIn(box)) {
    const whole = nodes.map(({ data }) => data).join("");
    for (let at = placeOf(whole, words); at >= 0 && found.length < MOST; at = placeOf(whole, words, at + words.length)) {
      const range = document.createRange();
      range.setStart(...pointAt(nodes, at));
      range.setEnd(...pointAt(nodes, at + words.length));
      found.push(range);
    }
  }
  return found;
}

// The node in which a place of the whole text is, and where in it.
function pointAt(nodes, place) {
  let rest = place;
  const node = nodes.find(({ data }) => {
    if (rest <= data.length) return true;
    rest -= data.length;
    return false;
  }) ?? nodes.at(-1);
  return [node, Math.min(rest, node.data.length)];
}

// A field that marks words in an element, without touching it, and goes through them. `content` is what the element shows.
export function Find({ box, words, change, content }) {
  const [found, setFound] = useState([]);
  const [nth, go] = useState(0);
  useEffect(() => {
    if (!CSS.highlights) return undefined;
    const ranges = words ? rangesOf(box.current, words) : [];
    CSS.highlights.set("found", new Highlight(...ranges));
    setFound(ranges);
    go(0);
    return () => CSS.highlights.delete("found");
  }, [words, content]);
  useEffect(() => {
    const range = found[nth];
    if (!range) return undefined;
    CSS.highlights.set("found-now", new Highlight(range));
    range.startContainer.parentElement?.scrollIntoView({ block: "nearest" });
    return () => CSS.highlights.delete("found-now");
  }, [found, nth]);
  const next = (event) => {
    event.preventDefault();
    if (found.length > 0) go((nth + 1) % found.length);
  };
  return html`<form class="search" role="search" onSubmit=${next}><input type="search" value=${words} placeholder="Find in this episode" aria-label="Find in this episode" onInput=${(event) => change(event.target.value)} />
    ${found.length > 0 && html`<button><${Icon} name="down" />Next</button>`}<span class="muted n" role="status">${words ? (found.length > 0 ? `${num(nth + 1)} of ${num(found.length)}` : "not found") : ""}</span></form>`;
}
