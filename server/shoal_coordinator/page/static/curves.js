// Curves of a job: a chart for each metric, of training (by worker or as a mean) and of held-out samples.

import { Chart, dashOf } from "./chart.js";
import { html, useMemo, useState } from "./html.js";
import { mean, smoothed } from "./job_history.js";
import { Card } from "./parts.js";

const SMOOTHING = 0.8;
const MAX_LINES = 8;

export function Curves({ history }) {
  const [each, setEach] = useState(false);
  const [smooth, setSmooth] = useState(false);
  const names = [...new Set([...history.metrics.keys(), ...history.evaluations.keys()])].sort(lossFirst);
  const charts = useMemo(
    () => names.map((name) => [name, lines(history, name, each, smooth)]),
    [history, history.version, each, smooth],
  );
  const tools = html`<div class="tools">
    <label><input type="checkbox" checked=${each}
        onChange=${(event) => setEach(event.target.checked)} /> Each worker</label>
    <label><input type="checkbox" checked=${smooth}
        onChange=${(event) => setSmooth(event.target.checked)} /> Smooth</label>
  </div>`;
  return html`<${Card} id="curves" title="Curves" wide tools=${tools}>
    ${charts.length ? "" : html`<p class="empty">No metrics yet. Workers report them once they train.</p>`}
    <div class="charts">${charts.map(([name, drawn]) => html`<${Chart} key=${name} title=${name}
        lines=${drawn} />`)}</div>
  <//>`;
}

const lossFirst = (a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b);

function lines(history, name, each, smooth) {
  const found = [];
  const smoothing = (values) => (smooth ? smoothed(values, SMOOTHING) : values);
  const workers = [...(history.metrics.get(name) ?? new Map())].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  if (each) {
    workers.slice(0, MAX_LINES).forEach(([worker, { steps, values }], number) => {
      const looks = { colour: `--line-${number % 8}`, dash: dashOf(number), width: 1.75 };
      found.push({ label: worker, steps, values: smoothing(values), ...looks });
    });
  } else if (workers.length) {
    const [steps, values] = mean(workers.map(([, points]) => points));
    found.push({ label: "training", steps, values: smoothing(values), colour: "--line-0", dash: [], width: 2 });
  }
  const held = history.evaluations.get(name);
  if (held) {
    found.push({ label: "held out", ...copy(held), colour: "--line-1", dash: [], width: 2, dots: true });
  }
  return found;
}

const copy = ({ steps, values }) => ({ steps: [...steps], values: [...values] });
