// What all pages share: HTML templates, requests, links, numbers as people read them.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);

export class NeedsToken extends Error {}

// The token of a viewer that is reached over a network; kept until the tab is closed.
export const token = {
  get: () => sessionStorage.getItem("astraflow-token") ?? "",
  set: (value) => sessionStorage.setItem("astraflow-token", value),
};

export async function ask(path, signal) {
  const headers = token.get() ? { authorization: `Bearer ${token.get()}` } : {};
  const reply = await fetch(path, { headers, signal });
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

// Asks again every `everyMs` while the tab is visible; 0 asks once. The last good answer stays on errors.
export function useAnswer(path, everyMs = 0) {
  const [state, setState] = useState({ data: undefined, error: null, path: null });
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const again = async () => {
      try {
        if (!document.hidden) {
          const data = await askJson(path, stop.signal);
          if (!stop.signal.aborted) setState({ data, error: null, path });
        }
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof NeedsToken) window.dispatchEvent(new Event("needs-token"));
        setState((old) => ({ data: old.path === path ? old.data : undefined, error: error.message, path }));
      }
      if (everyMs) timer = setTimeout(again, everyMs);
    };
    again();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs]);
  return state.path === path ? state : { data: undefined, error: null };
}

export function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
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
