// A chart component on uPlot: lines over steps in the colours of the style sheet, with a text for screen readers.

import { count, metric } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Numbers } from "./parts.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

const HEIGHT = 220;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const TABLE_ROWS = 20;

// The dashes of a line, which differ as colours do.
export const dashOf = (number) => DASHES[Math.floor(number / 2) % DASHES.length];

// Draws `lines`: [{label, steps, values, colour, dash, width, dots}]. A colour is the name of a CSS custom property.
export function Chart({ title, lines }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const drawn = useMemo(() => lines.filter((line) => line.steps.length), [lines]);
  const data = useMemo(() => joined(drawn), [drawn]);
  const kinds = drawn.map((line) => `${line.label} ${line.colour}`).join("\n");
  useEffect(() => {
    if (!drawn.length) return undefined;
    const made = new uPlot(options(drawn, place.current, setAt), data, place.current);
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    watcher.observe(place.current);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [kinds, theme]);
  useEffect(() => plot.current?.setData(data), [data]);
  if (!drawn.length) return html`<figure><figcaption>${title}</figcaption><p class="empty">No data yet.</p></figure>`;
  return html`<figure class="chart" data-chart=${title} data-points=${Math.max(...drawn.map((it) => it.steps.length))}>
    <figcaption>${title} <span class="soft">${at === null ? latest(drawn) : reading(drawn, at)}</span></figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${title} by step: ${summary(drawn)}`}></div>
    <ul class="legend">
      ${drawn.map((line) => html`<li><${Swatch} line=${line} /> <bdi>${line.label}</bdi></li>`)}
    </ul>
    <${Numbers} title=${title}>${() => tables(title, drawn)}<//>
  </figure>`;
}

function Swatch({ line }) {
  const dash = line.dots ? "1 5" : line.dash.join(" ");
  return html`<svg class="swatch" width="26" height="10" aria-hidden="true">
    <line x1="1" y1="5" x2="25" y2="5" style=${{ stroke: `var(${line.colour})` }} stroke-width=${line.dots ? 4 : 2.5}
        stroke-linecap=${line.dots ? "round" : "butt"} stroke-dasharray=${dash} />
  </svg>`;
}

function tables(title, lines) {
  return lines.map((line) => {
    const every = Math.max(1, Math.ceil(line.steps.length / TABLE_ROWS));
    const rows = line.steps.map((_, index) => index).filter((index) => (line.steps.length - 1 - index) % every === 0);
    return html`<table>
      <caption>${line.label}</caption>
      <thead><tr><th scope="col" class="number">Step</th><th scope="col" class="number">${title}</th></tr></thead>
      <tbody>
        ${rows.map((index) => html`<tr><td class="number">${count(line.steps[index])}</td><td
            class="number">${metric(line.values[index])}</td></tr>`)}
      </tbody>
    </table>`;
  });
}

function options(lines, place, setAt) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return {
    width: place.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } }, // new data would undo a zoom at once
    scales: { x: { time: false } },
    axes: [
      { ...axis, size: 30, values: (_, splits) => splits.map((it) => (Number.isInteger(it) ? count(it) : "")) },
      { ...axis, size: 62, values: (_, splits) => splits.map((it) => short(it)) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: colour(line.colour),
        width: line.width ?? 2,
        dash: line.dash,
        spanGaps: true,
        points: {
          show: (made, series) => Boolean(line.dots) || made.data[series].length < 2,
          size: 6,
          fill: colour(line.colour),
        },
      })),
    ],
    hooks: { setCursor: [(made) => setAt(made.cursor.idx == null ? null : made.data[0][made.cursor.idx])] },
  };
}

// Joins the steps of all lines. uPlot connects a line across steps at which it has no point.
function joined(lines) {
  if (!lines.length) return [[]];
  return uPlot.join(lines.map((line) => [line.steps, line.values]));
}

function short(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(0) : String(+value.toPrecision(4));
}

function latest(lines) {
  return lines.map((line) => (lines.length > 1 ? `${line.label} ` : "") + metric(line.values.at(-1))).slice(0, 4).join(" · ");
}

function reading(lines, step) {
  const found = lines.map((line) => {
    const index = line.steps.findLastIndex((it) => it <= step);
    return index < 0 ? null : `${lines.length > 1 ? `${line.label} ` : ""}${metric(line.values[index])}`;
  });
  return `step ${count(step)}: ${found.filter(Boolean).slice(0, 4).join(" · ")}`;
}

function summary(lines) {
  return lines
    .slice(0, 8)
    .map(({ label, values, steps }) => {
      const finite = values.filter((it) => it !== null);
      if (!finite.length) return `${label}: no finite value`;
      const least = finite.reduce((a, b) => Math.min(a, b));
      const most = finite.reduce((a, b) => Math.max(a, b));
      const ends = `from ${metric(finite[0])} to ${metric(finite.at(-1))} at step ${count(steps.at(-1))}`;
      return `${label}: ${ends}, between ${metric(least)} and ${metric(most)}`;
    })
    .join("; ");
}

// Returns another value when the user's colour scheme changes.
function useTheme() {
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const change = () => setDark(media.matches);
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);
  return dark;
}
