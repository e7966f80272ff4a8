// Rows of metrics, and the lines of charts that are made from them.
import { useEffect, useRef, useState } from "preact/hooks";
import { ANSWERS, askJson } from "./base.js";

// Rows of metrics.jsonl, each fetched once.
export function useMetrics(run, everyMs) {
  const [rows, setRows] = useState(null);
  const kept = useRef({ run, rows: [] });
  useEffect(() => {
    kept.current = { run, rows: [], isNew: true };
    setRows(null);
    let isOver = false;
    let timer = 0;
    const again = async () => {
      try {
        const after = kept.current.rows.at(-1)?.id ?? 0;
        const found = document.hidden ? [] : await askJson(`api/runs/${encodeURIComponent(run)}/metrics?after=${after}`);
        if (isOver) return;
        if (found.length || kept.current.isNew) {
          kept.current.isNew = false;
          kept.current.rows = [...kept.current.rows, ...found];
          setRows(kept.current.rows);
        }
      } catch {
        if (!isOver) setRows((old) => old ?? []);
        // The overview shows what is wrong; the curves stay as they are.
      }
      if (everyMs && !isOver && !ANSWERS) timer = setTimeout(again, everyMs);
    };
    again();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [run, everyMs]);
  return rows;
}

// Seconds since the first row, by row. A clock that is set back stands still until it is where it was.
function secondsOf(rows) {
  let latest = rows[0]?.at_s ?? 0;
  return new Map(rows.map((row) => {
    latest = Math.max(latest, row.at_s);
    return [row, latest - rows[0].at_s];
  }));
}

// Points in the order of x, which is needed to draw them. A step that was repeated counts as it was done last.
function pointsOf(rows, over, seconds) {
  const xOf = (row) => (over === "seconds" ? seconds.get(row) : over === "tokens" ? row.tokens_so_far : row.step);
  const isSorted = rows.every((row, idx) => idx === 0 || xOf(rows[idx - 1]) < xOf(row));
  const kept = isSorted ? rows : [...new Map(rows.map((row) => [xOf(row), row])).values()].sort((a, b) => xOf(a) - xOf(b));
  return { kept, x: kept.map(xOf) };
}

// One color for each line; of several policies, one for each policy and a dash for each metric.
export function seriesOf(rows, names, over = "step", prefix = "") {
  const words = Array.isArray(names) ? names.map((name) => [name, name]) : Object.entries(names);
  const steps = rows.filter((row) => row.kind === "step");
  const policies = [...new Set(steps.map((row) => row.policy))];
  const seconds = over === "seconds" ? secondsOf(rows) : null;
  return policies.flatMap((policy, color) =>
    words.map(([name, said], dash) => {
      const { kept, x } = pointsOf(steps.filter((row) => row.policy === policy && row[name] != null), over, seconds);
      const look = policies.length > 1 && words.length > 1 ? { color, dash } : {};
      return { label: `${prefix}${policies.length > 1 || prefix ? `${policy} ` : ""}${said}`, name, x, y: kept.map((row) => row[name]), rows: kept, ...look };
    }),
  );
}

export function evalSeries(rows, over = "step", prefix = "") {
  const evals = rows.filter((row) => row.kind === "eval" && row.score_mean != null);
  const keys = [...new Set(evals.map((row) => `${row.policy} ${row.eval_set}`))];
  const seconds = over === "seconds" ? secondsOf(rows) : null;
  return keys.map((key) => {
    const { kept, x } = pointsOf(evals.filter((row) => `${row.policy} ${row.eval_set}` === key), over, seconds);
    return {
      label: prefix + key,
      x,
      rows: kept,
      y: kept.map((row) => row.score_mean),
      low: kept.map((row) => row.score_mean - 2 * row.score_stderr),
      high: kept.map((row) => row.score_mean + 2 * row.score_stderr),
    };
  });
}
