// Curves, by uPlot. Colours come from the style sheet, so that light and dark agree.
import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";
import { html, num, useSeen, useWidth } from "./base.js";

const HEIGHT = 170;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (idx) => style(`--series-${idx % 8}`);

// series: [{label, x: [], y: [], low?: [], high?: [], dash?}]. Joins them over one x axis. A chart is drawn again when it
// gets another list while it is on the screen, so callers keep theirs until it changes.
function joined(series) {
  const tables = series.flatMap(({ x, y, low, high }) => {
    const parts = [[x, y]];
    if (low) parts.push([x, low], [x, high]);
    return parts;
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

function options(series, width, xLabel) {
  const axis = {
    stroke: style("--muted"),
    grid: { stroke: style("--line"), width: 1 },
    ticks: { stroke: style("--line"), width: 1 },
    font: "11px system-ui",
    size: 46,
  };
  const lines = [{ label: xLabel }];
  const bands = [];
  series.forEach(({ label, low, dash }, idx) => {
    lines.push({ label, stroke: colour(idx), width: 1.5, dash, spanGaps: true, points: { show: low !== undefined } });
    if (low) {
      const at = lines.length;
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      lines.push({ ...edge, label: `${label} low` }, { ...edge, label: `${label} high` });
      bands.push({ series: [at + 1, at], fill: `${colour(idx)}33` });
    }
  });
  return {
    width,
    height: HEIGHT,
    series: lines,
    bands,
    legend: { show: false },
    cursor: { points: { size: 6 }, sync: { key: "steps" } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, size: 30 },
      { ...axis, values: (_, values) => values.map((value) => num(value, 4)) },
    ],
  };
}

export function Chart({ title, series, xLabel = "step" }) {
  const [box, width] = useWidth();
  const isSeen = useSeen(box);
  const target = useRef(null);
  const plot = useRef(null);
  const shown = series.filter(({ x }) => x.length > 0);
  const shape = `${width} ${xLabel} ${shown.map(({ label, low }) => label + (low ? "b" : "")).join("|")}`;
  useEffect(() => {
    if (!width || shown.length === 0) return undefined;
    plot.current = new uPlot(options(shown, width, xLabel), joined(shown), target.current);
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, document.documentElement.dataset.theme]);
  useEffect(() => {
    if (plot.current && isSeen) plot.current.setData(joined(shown));
  }, [series, isSeen]);
  const last = (line) => line.y.findLast((value) => value != null);
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${box}><div ref=${target} aria-hidden="true"></div></div>
    ${shown.length === 0 && html`<p class="muted">nothing yet</p>`}
    <ul class="legend">
      ${shown.map(
        (line, idx) => html`<li><span class=${`key k${idx % 8}`}></span>${line.label} <b>${num(last(line))}</b></li>`,
      )}
    </ul>
  </figure>`;
}
