// What all pages share: HTML templates, requests, links, numbers as people read them.
import { h } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);

export class NeedsToken extends Error {}
class Away extends Error {}

// The token of a viewer that is reached over a network; kept until the tab is closed.
export const token = {
  get: () => sessionStorage.getItem("astraflow-token") ?? "",
  set: (value) => sessionStorage.setItem("astraflow-token", value),
};

// Whether the viewer answers. Pages keep what they show while it doesn't, and one line says since when.
const tell = (isAway) => window.dispatchEvent(new CustomEvent("viewer", { detail: { isAway } }));

// A report is this page with what it shows inside; otherwise, the viewer is asked.
const inside = document.getElementById("answers");
export const ANSWERS = inside && JSON.parse(inside.textContent);

function answerInside(path) {
  const plain = decodeURIComponent(path.replaceAll("+", " "));
  // Of the time line, a report has the whole, which stands for any part.
  const answer = ANSWERS[plain] ?? ANSWERS[plain.replace(/\?from=.*/, "?")];
  if (answer === undefined) throw new Error("This file doesn't contain that. Open the run with astraflow view to see all of it.");
  return new Response(JSON.stringify(answer));
}

export async function ask(path, signal) {
  if (ANSWERS) return answerInside(path);
  const headers = token.get() ? { authorization: `Bearer ${token.get()}` } : {};
  const reply = await fetch(path, { headers, signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    tell(true);
    throw new Away("The viewer doesn't answer.");
  });
  tell(false);
  if (reply.status === 401) throw new NeedsToken("this viewer needs a token");
  if (!reply.ok) {
    let message = `${reply.status} ${reply.statusText}`;
    try {
      message = (await reply.json()).message ?? message;
    } catch {
      // No JSON: the status says what there is to say.
    }
    throw new Error(message);
  }
  return reply;
}

export const askJson = async (path, signal) => (await ask(path, signal)).json();

// A download goes through fetch, so that it can show the token.
export async function download(path, name) {
  const blob = await (await ask(path)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value != null)).toString();

// Asks again every `everyMs` while the tab is visible; 0 asks once. The last good answer stays on errors, and nothing is
// drawn again for an answer that says the same.
export function useAnswer(path, everyMs = 0) {
  const [state, setState] = useState({ data: undefined, error: null, path: null });
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let last = null;
    const again = async () => {
      try {
        if (!document.hidden) {
          const text = await (await ask(path, stop.signal)).text();
          if (!stop.signal.aborted && text !== last) setState({ data: JSON.parse(text), error: null, path });
          last = text;
        }
      } catch (error) {
        if (stop.signal.aborted) return;
        last = null;
        if (error instanceof NeedsToken) window.dispatchEvent(new Event("needs-token"));
        setState((old) => {
          const data = old.path === path ? old.data : undefined;
          return { data, error: data !== undefined && error instanceof Away ? null : error.message, path };
        });
      }
      if (everyMs && !ANSWERS) timer = setTimeout(again, everyMs);
    };
    again();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs]);
  return state.path === path ? state : { data: undefined, error: null };
}

// The width is known before the first paint, so that nothing moves.
export function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const { paddingLeft, paddingRight } = getComputedStyle(ref.current);
    setWidth(Math.floor(ref.current.clientWidth - Number.parseFloat(paddingLeft) - Number.parseFloat(paddingRight)));
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

// Whether the element is on the screen, or nearly.
export function useSeen(ref) {
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => setSeen(entry.isIntersecting), { rootMargin: "200px" });
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return isSeen;
}

// "light" or "dark", by the system or by what was chosen here.
const dark = matchMedia("(prefers-color-scheme: dark)");
const schemeNow = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");

export function useScheme() {
  const [scheme, set] = useState(schemeNow);
  useEffect(() => {
    const change = () => set(schemeNow());
    dark.addEventListener("change", change);
    window.addEventListener("theme", change);
    return () => {
      dark.removeEventListener("change", change);
      window.removeEventListener("theme", change);
    };
  }, []);
  return scheme;
}

// One of a few values, all of which can be seen.
export function Segments({ label, value, options, choose }) {
  return html`<span class="segments" role="group" aria-label=${label}>${options.map(
    ([name, words]) => html`<button key=${name} aria-pressed=${String(name === value)} onClick=${() => choose(name)}>${words}</button>`,
  )}</span>`;
}

// What a page looks like before its data has arrived.
export function Skeleton() {
  return html`<div class="skeleton" role="status"><span class="sr">Loading…</span><i class="tall"></i><i class="taller"></i><div class="charts"><i class="taller"></i><i class="taller"></i><i class="taller"></i></div></div>`;
}

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error}</p>` : null;
}

export const link = (...parts) => `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;

export const num = (value, digits = 3) => {
  if (value == null || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
};

export const bytes = (value) => {
  if (value == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit ? size.toFixed(size < 10 ? 2 : 1) : size} ${units[unit]}`;
};

export const ago = (seconds) => {
  if (seconds == null) return "–";
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
};

export const clock = (atS) => new Date(atS * 1000).toLocaleTimeString("en-GB");
