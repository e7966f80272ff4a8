// Curves, by uPlot. Colors come from the style sheet, so that light and dark agree.
import uPlot from "uplot";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { html, num, useScheme, useSeen, useWidth } from "./base.js";
import { useChoices } from "./choices.js";
import { Icon } from "./icons.js";

const HEIGHT = 170;
const NUM_COLORS = 8;
const DASHES = [undefined, [6, 3], [2, 3]];
const FEW = 40;
// Distances of marks on an axis of steps or versions, of which there are no halves.
const WHOLE = Array.from({ length: 36 }, (_, idx) => [1, 2, 5][idx % 3] * 10 ** Math.floor(idx / 3));

// A color of the style sheet as the canvas needs it: resolved for light or dark, and with an opacity.
function resolved(name, share = 1) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = share === 1 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${100 * share}%, transparent)`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

// The mean of the values around each, over a twentieth of the curve. Sums from both ends of blocks as long as the window
// make it one pass, however long the curve is, and without differences of large sums.
export function smooth(values) {
  const half = Math.floor(values.length / 40);
  const width = 2 * half + 1;
  const size = values.length + 2 * half;
  const at = (idx) => values[idx - half] ?? 0;
  const has = (idx) => (values[idx - half] == null ? 0 : 1);
  const make = () => ({ sums: new Float64Array(size), counts: new Uint32Array(size) });
  const [before, after] = [make(), make()];
  for (let idx = 0; idx < size; idx += 1) {
    const isFirst = idx % width === 0;
    before.sums[idx] = at(idx) + (isFirst ? 0 : before.sums[idx - 1]);
    before.counts[idx] = has(idx) + (isFirst ? 0 : before.counts[idx - 1]);
  }
  for (let idx = size - 1; idx >= 0; idx -= 1) {
    const isLast = idx === size - 1 || (idx + 1) % width === 0;
    after.sums[idx] = at(idx) + (isLast ? 0 : after.sums[idx + 1]);
    after.counts[idx] = has(idx) + (isLast ? 0 : after.counts[idx + 1]);
  }
  return values.map((value, idx) => {
    if (value == null) return value;
    const end = idx + width - 1;
    const isWhole = idx % width === 0;
    return (after.sums[idx] + (isWhole ? 0 : before.sums[end])) / (after.counts[idx] + (isWhole ? 0 : before.counts[end]));
  });
}

const isSmoothed = (line, isSmooth) => isSmooth && !line.low && line.y.length >= FEW;

// series: [{label, x: [], y: [], low?: [], high?: [], rows?: [], color?, dash?}]. Joins them over one x axis. A chart is
// drawn again when it gets another list while it is on the screen, so callers keep theirs until it changes.
function joined(series, { isSmooth, isLog }) {
  // A logarithmic axis has no place for 0 and less.
  const drawn = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = series.map((line) => {
    if (line.low) return [line.x, drawn(line.y), drawn(line.low), drawn(line.high)];
    return isSmoothed(line, isSmooth) ? [line.x, drawn(line.y), drawn(smooth(line.y))] : [line.x, drawn(line.y)];
  });
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

// A flat line lies in the middle of its chart, or on its ground if it is 0, instead of on an axis of its own rounding errors.
const rangeOf = (_, low, high) => {
  if (low == null) return [0, 1];
  if (high - low > 1e-9 * Math.max(1, Math.abs(high))) {
    const room = 0.06 * (high - low);
    return [low >= 0 && low < room ? 0 : low - room, high + room];
  }
  if (low === 0) return [0, 1];
  const room = Math.abs(low);
  return [low - room, low + room];
};

// The lines that uPlot draws for the series, and where in its data the values of each series are.
function linesOf(series, isSmooth) {
  const lines = [];
  const bands = [];
  const places = [];
  series.forEach((line, idx) => {
    const color = `--series-${(line.color ?? idx) % NUM_COLORS}`;
    const isPair = isSmoothed(line, isSmooth);
    const base = { dash: DASHES[(line.dash ?? 0) % DASHES.length], spanGaps: true };
    places.push(lines.length + 1);
    const isDotted = line.low !== undefined || line.y.length === 1;
    lines.push({ ...base, stroke: resolved(color, isPair ? 0.3 : 1), width: isPair ? 1 : 1.75, points: { show: isDotted, size: 6, fill: resolved("--card") } });
    if (isPair) lines.push({ ...base, stroke: resolved(color), width: 1.75, points: { show: false } });
    if (line.low) {
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      lines.push(edge, edge);
      bands.push({ series: [lines.length, lines.length - 1], fill: resolved(color, 0.18) });
    }
  });
  return { lines, bands, places };
}

const logRange = (_, low, high) => (low == null ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false));

function options(series, width, xLabel, { isSmooth, isLog }, hooks) {
  const { lines, bands, places } = linesOf(series, isSmooth);
  const line = { stroke: resolved("--line"), width: 1 };
  const axis = { stroke: resolved("--muted"), grid: line, ticks: { show: false }, font: `11px ${getComputedStyle(document.body).fontFamily}`, gap: 6 };
  return {
    width,
    height: HEIGHT,
    padding: [6, 10, 0, 0],
    series: [{ label: xLabel }, ...lines],
    bands,
    legend: { show: false },
    cursor: { points: { size: 7 }, sync: { key: xLabel }, bind: { mousedown: startMoving } },
    scales: { x: { time: false }, y: isLog ? { distr: 3, range: logRange } : { range: rangeOf } },
    axes: [{ ...axis, size: 26, grid: { show: false }, ...(xLabel === "seconds" ? {} : { incrs: WHOLE }) }, { ...axis, size: 46, values: (_, values) => values.map((value) => (value == null ? "" : num(value, 4))) }],
    hooks: { ready: [zoomByWheel, (plot) => openByClick(plot, hooks.open)], setCursor: [(plot) => hooks.read(plot, places)] },
  };
}

// --- moving along the x axis: a drag zooms, Shift and a drag move, Ctrl and the wheel zoom, a double click shows all ---

const follow = (plot, range) => uPlot.sync(plot.cursor.sync.key).plots.forEach((each) => each !== plot && each.setScale("x", range));

function within(plot, min, max) {
  const [first, last] = [plot.data[0][0], plot.data[0].at(-1)];
  const size = Math.min(max - min, last - first);
  const start = Math.min(Math.max(min, first), last - size);
  return { min: start, max: start + size };
}

const startMoving = (plot, target, select) => (event) => {
  if (!event.shiftKey) {
    select(event);
    return;
  }
  const { min, max } = plot.scales.x;
  const perPixel = (max - min) / plot.over.clientWidth;
  let range = { min, max };
  const move = ({ clientX }) => {
    const by = (event.clientX - clientX) * perPixel;
    range = within(plot, min + by, max + by);
    plot.setScale("x", range);
  };
  const stop = () => {
    window.removeEventListener("mousemove", move);
    follow(plot, range);
  };
  window.addEventListener("mousemove", move);
  window.addEventListener("mouseup", stop, { once: true });
};

function zoomByWheel(plot) {
  plot.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { min, max } = plot.scales.x;
    const at = plot.posToVal(event.offsetX, "x");
    const by = event.deltaY > 0 ? 1.25 : 0.8;
    const range = within(plot, at - (at - min) * by, at + (max - at) * by);
    plot.setScale("x", range);
    follow(plot, range);
  }, { passive: false });
}

// A click opens what is behind the point below it. A finger taps to read values, so taps open nothing.
function openByClick(plot, open) {
  let from = 0;
  plot.over.addEventListener("mousedown", ({ clientX }) => { from = clientX; });
  plot.over.addEventListener("click", (event) => {
    const isDrag = event.shiftKey || Math.abs(event.clientX - from) > 3;
    if (!isDrag && plot.cursor.idx != null && event.pointerType !== "touch") open(plot);
  });
}

// The row behind the cursor: of the line that is nearest to it, the point that is nearest in x.
function rowAt(plot, series, places) {
  const { idx, top } = plot.cursor;
  const at = plot.data[0][idx];
  const away = (place) => {
    const value = nearest(plot.data[place], idx);
    return value == null ? Infinity : Math.abs(plot.valToPos(value, "y") - top);
  };
  const chosen = series.map((line, nth) => [away(places[nth]), line]).sort(([a], [b]) => a - b)[0]?.[1];
  if (!chosen?.rows) return null;
  const best = chosen.x.reduce((old, x, nth) => (Math.abs(x - at) < Math.abs(chosen.x[old] - at) ? nth : old), 0);
  return [chosen.rows[best], chosen];
}

// New rows leave a part that someone zoomed into as it is.
function renew(plot, data) {
  const { min, max } = plot.scales.x;
  const isWhole = min == null || (min <= plot.data[0][0] && max >= plot.data[0].at(-1));
  plot.setData(data, isWhole);
  if (!isWhole) plot.setScale("x", { min, max });
}

// --- the chart ---

const lastOf = (values) => values.findLast((value) => value != null);

function nearest(values, idx) {
  for (let by = 0; by < values.length; by += 1) {
    const found = values[idx - by] ?? values[idx + by];
    if (found != null) return found;
  }
  return null;
}

// `open(row, line)` shows what is behind a point. A chart with `name` can be pinned and has a choice of axis.
export function Chart({ title, series, xLabel = "step", isSmooth = false, name, open }) {
  const [box, width] = useWidth();
  const isSeen = useSeen(box);
  const figure = useRef(null);
  const target = useRef(null);
  const plot = useRef(null);
  const choices = useChoices();
  const shown = useMemo(() => series.filter(({ y }) => y.some((value) => value != null)), [series]);
  const scheme = useScheme();
  const isLog = choices.log.includes(name) && shown.some(({ y }) => y.some((value) => value > 0));
  const look = { isSmooth, isLog };
  const shape = `${width > 0} ${scheme} ${xLabel} ${isSmooth} ${isLog} ${shown.map((line) => `${line.label}${line.low ? "b" : ""}${isSmoothed(line, isSmooth)}`).join("|")}`;
  const latest = useRef({});
  latest.current = { shown, open };
  // The legend has the newest values, or those at the cursor, which moves too often to draw the legend anew.
  const read = (at, places) => {
    const { idx } = at.cursor;
    latest.current.places = places;
    figure.current.querySelector(".at").textContent = idx == null ? "" : `${xLabel} ${num(at.data[0][idx], 5)}`;
    figure.current.querySelectorAll(".legend b").forEach((cell, nth) => {
      const values = at.data[places[nth]];
      // A cursor of another chart may move while this one is about to be drawn again with a further line.
      if (values) cell.firstChild.data = num(idx == null ? lastOf(values) : nearest(values, idx));
    });
  };
  const openAt = (at) => {
    const now = latest.current;
    const found = now.open && now.places && rowAt(at, now.shown, now.places);
    if (found) now.open(...found);
  };
  useEffect(() => {
    if (!width || shown.length === 0) return undefined;
    plot.current = new uPlot(options(shown, width, xLabel, look, { read, open: openAt }), joined(shown, look), target.current);
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setSize({ width, height: HEIGHT }), [width]);
  useEffect(() => {
    if (plot.current && isSeen) renew(plot.current, joined(shown, look));
  }, [shown, isSeen]);
  const keyOf = (line, idx) => `key k${(line.color ?? idx) % NUM_COLORS} ${["", "dashed", "dotted"][(line.dash ?? 0) % DASHES.length]}`;
  return html`<figure class=${`chart ${open ? "opens" : ""}`} ref=${figure}>
    <figcaption><span>${title}</span><span class="at"></span>${name && html`<${Tools} title=${title} name=${name} choices=${choices} />`}</figcaption>
    <div ref=${box} class="plot"><div ref=${target} aria-hidden="true"></div>${shown.length === 0 && html`<p class="muted">Nothing yet</p>`}</div>
    <ul class=${`legend ${shown.length > 8 ? "long" : ""}`} tabindex=${shown.length > 8 ? "0" : undefined}>
      ${shown.map((line, idx) => html`<li key=${line.label} title=${line.name ?? line.label}><span class=${keyOf(line, idx)}></span>${line.label} <b>${num(lastOf(line.y))}</b></li>`)}
    </ul>
  </figure>`;
}

function Tools({ title, name, choices }) {
  const button = (kind, words, content) => html`<button class="plain" aria-pressed=${String(choices[kind].includes(name))} title=${words} aria-label=${`${words}: ${title}`} onClick=${() => choices.toggle(kind, name)}>${content}</button>`;
  return html`<span class="tools">${button("log", "Logarithmic axis", "log")}${button("pinned", "Keep at the top", html`<${Icon} name="pin" />`)}</span>`;
}
