// Curves, by uPlot. Colours come from the style sheet, so that light and dark agree.
import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";
import { html, num, useSeen, useWidth } from "./base.js";

const HEIGHT = 170;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (idx) => style(`--series-${idx % 8}`);

// series: [{label, x: [], y: [], low?: [], high?: [], dash?}]. Joins them over one x axis. A chart is drawn again when it
// gets another list while it is on the screen, so callers keep theirs until it changes.
function joined(series, isSmooth) {
  const tables = series.flatMap(({ x, y, low, high }) => {
    const parts = isSmooth && !low ? [[x, y], [x, smooth(y)]] : [[x, y]];
    if (low) parts.push([x, low], [x, high]);
    return parts;
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

// The mean of the values around each, over a twentieth of the curve; short curves stay as they are.
function smooth(values) {
  const half = Math.floor(values.length / 40);
  return values.map((value, idx) => {
    if (half === 0 || value == null) return value;
    const near = values.slice(Math.max(0, idx - half), idx + half + 1).filter((each) => each != null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

// A flat line lies in the middle of its chart instead of on an axis of its own rounding errors.
const rangeOf = (_, low, high) => {
  if (low == null) return [0, 1];
  if (high - low > 1e-9 * Math.max(1, Math.abs(high))) {
    const room = 0.06 * (high - low);
    return [low >= 0 && low < room ? 0 : low - room, high + room];
  }
  const room = Math.abs(low) || 1;
  return [low - room, low + room];
};

function options(series, width, xLabel, isSmooth) {
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
    const isPair = isSmooth && !low;
    lines.push({ label, stroke: colour(idx) + (isPair ? "55" : ""), width: isPair ? 1 : 2, dash, spanGaps: true, points: { show: low !== undefined } });
    if (isPair) lines.push({ label, stroke: colour(idx), width: 2, spanGaps: true, points: { show: false } });
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
    scales: { x: { time: false }, y: { range: rangeOf } },
    axes: [
      { ...axis, size: 30 },
      { ...axis, values: (_, values) => values.map((value) => num(value, 4)) },
    ],
  };
}

export function Chart({ title, series, xLabel = "step", isSmooth = false }) {
  const [box, width] = useWidth();
  const isSeen = useSeen(box);
  const target = useRef(null);
  const plot = useRef(null);
  const shown = series.filter(({ x }) => x.length > 0);
  const shape = `${width} ${xLabel} ${isSmooth} ${shown.map(({ label, low }) => label + (low ? "b" : "")).join("|")}`;
  useEffect(() => {
    if (!width || shown.length === 0) return undefined;
    plot.current = new uPlot(options(shown, width, xLabel, isSmooth), joined(shown, isSmooth), target.current);
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, document.documentElement.dataset.theme]);
  useEffect(() => {
    if (plot.current && isSeen) plot.current.setData(joined(shown, isSmooth));
  }, [series, isSeen]);
  const last = (line) => line.y.findLast((value) => value != null);
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${box} class="plot"><div ref=${target} aria-hidden="true"></div></div>
    ${shown.length === 0 && html`<p class="muted">nothing yet</p>`}
    <ul class="legend">
      ${shown.map(
        (line, idx) => html`<li title=${line.name ?? line.label}><span class=${`key k${idx % 8}`}></span>${line.label} <b>${num(last(line))}</b></li>`,
      )}
    </ul>
  </figure>`;
}
