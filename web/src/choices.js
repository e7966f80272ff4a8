// What a person chose for charts. This browser keeps it, for all runs: which are at the top, and which have a
// logarithmic axis.
import { useEffect, useState } from "preact/hooks";

const KEY = "astraflow-charts";
const NONE = { pinned: [], log: [] };

function read() {
  try {
    const kept = { ...NONE, ...JSON.parse(localStorage.getItem(KEY)) };
    return Array.isArray(kept.pinned) && Array.isArray(kept.log) ? kept : NONE;
  } catch {
    return NONE;
  }
}

// `toggle(kind, name)` adds a chart to "pinned" or "log", or removes it. Other tabs follow.
export function useChoices() {
  const [kept, set] = useState(read);
  useEffect(() => {
    const change = () => set(read());
    for (const event of ["charts", "storage"]) window.addEventListener(event, change);
    return () => {
      for (const event of ["charts", "storage"]) window.removeEventListener(event, change);
    };
  }, []);
  const toggle = (kind, name) => {
    const now = read();
    const names = now[kind].includes(name) ? now[kind].filter((each) => each !== name) : [...now[kind], name];
    localStorage.setItem(KEY, JSON.stringify({ ...now, [kind]: names }));
    window.dispatchEvent(new Event("charts"));
  };
  return { ...kept, toggle };
}
