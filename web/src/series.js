// Rows of metrics, and the lines of charts that are made from them.
import { useEffect, useRef, useState } from "preact/hooks";
import { askJson } from "./base.js";

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
      if (everyMs && !isOver) timer = setTimeout(again, everyMs);
    };
    again();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [run, everyMs]);
  return rows;
}

export function seriesOf(rows, names, over = "step", prefix = "") {
  const policies = [...new Set(rows.map((row) => row.policy))];
  const start = rows[0]?.at_s ?? 0;
  return policies.flatMap((policy) =>
    Object.entries(Array.isArray(names) ? Object.fromEntries(names.map((name) => [name, name])) : names).map(([name, words]) => {
      const own = rows.filter((row) => row.kind === "step" && row.policy === policy && row[name] != null);
      const label = `${prefix}${policies.length > 1 || prefix ? `${policy} ` : ""}${words}`;
      return { label, name, x: own.map((row) => xOf(row, over, start)), y: own.map((row) => row[name]) };
    }),
  );
}

const xOf = (row, over, start) => (over === "seconds" ? row.at_s - start : over === "tokens" ? row.tokens_so_far : row.step);

export function evalSeries(rows, over = "step", prefix = "") {
  const evals = rows.filter((row) => row.kind === "eval" && row.score_mean != null);
  const start = rows[0]?.at_s ?? 0;
  const keys = [...new Set(evals.map((row) => `${row.policy} ${row.eval_set}`))];
  return keys.map((key) => {
    const own = evals.filter((row) => `${row.policy} ${row.eval_set}` === key);
    return {
      label: prefix + key,
      x: own.map((row) => xOf(row, over, start)),
      y: own.map((row) => row.score_mean),
      low: own.map((row) => row.score_mean - 2 * row.score_stderr),
      high: own.map((row) => row.score_mean + 2 * row.score_stderr),
    };
  });
}
