// The phases of the latest steps: one bar for each worker and step, with the slowest and the straggler marked.

import { count, seconds } from "./format.js";
import { html, useEffect, useRef } from "./html.js";
import { Card, Numbers, Table } from "./parts.js";

// The phases from the bottom of a bar to its top. Phases of waiting for others are hatched.
const PHASES = ["pull", "wait", "read", "compute", "push", "evaluate"];
const FOR_OTHERS = ["pull", "wait"];
const STEPS = 24;
const MAX_BARS = 6;
const HEIGHT = 150;
const BAR = 11;

// `timings` is the result of `usePolled`.
export function Timeline({ timings: { value, error } }) {
  const workers = (value?.workers ?? []).filter((it) => it.steps.length);
  workers.sort((a, b) => a.worker.localeCompare(b.worker, "en", { numeric: true }));
  if (!workers.length) {
    return html`<${Card} id="timeline" title="Where steps spend their time" wide>
      <p class="empty">${error && !value ? error.message : "No timings yet."}</p>
    <//>`;
  }
  const straggler = value.straggler;
  const drawn = chosen(workers, straggler);
  return html`<${Card} id="timeline" title="Where steps spend their time" wide>
    <p class="verdict" data-straggler=${straggler?.worker ?? ""}>${verdict(straggler, workers.length)}</p>
    <${Bars} workers=${drawn} straggler=${straggler?.worker} />
    <${Medians} workers=${workers} straggler=${straggler?.worker} />
    <${Numbers} title="The latest steps">${() => html`<${Steps} workers=${drawn} />`}<//>
  <//>`;
}

export function verdict(straggler, workers) {
  if (straggler) {
    return html`<strong>${straggler.worker} is the straggler:</strong> its own part of a step takes
      ${" "}${straggler.ratio.toFixed(1)} times as long as the others', ${seconds(straggler.seconds)} more, most of it in
      ${" "}<strong>${straggler.phase}</strong>.`;
  }
  return workers > 1 ? "No worker is noticeably slower than the others." : "There is only one worker.";
}

function chosen(workers, straggler) {
  if (workers.length <= MAX_BARS) return workers;
  const first = workers.filter((it) => it.worker === straggler?.worker);
  const others = workers.filter((it) => it.worker !== straggler?.worker);
  return [...first, ...others.slice(0, MAX_BARS - first.length)];
}

const whole = (timing) => PHASES.reduce((sum, phase) => sum + timing[phase], 0);

function latestSteps(workers) {
  const all = new Set(workers.flatMap((it) => it.steps.map((timing) => timing.step)));
  return [...all].sort((a, b) => a - b).slice(-STEPS);
}

function Bars({ workers, straggler }) {
  const latest = latestSteps(workers);
  const names = workers.map((it) => it.worker).join(", ");
  const at = workers.map((it) => [it.worker, new Map(it.steps.map((timing) => [timing.step, timing]))]);
  const shown = at.flatMap(([, steps]) => latest.filter((step) => steps.has(step)).map((step) => steps.get(step)));
  const longest = Math.max(...shown.map(whole));
  // A step that took far longer than the others is cut off, so that the others stay visible.
  const height = Math.min(longest, 2 * quantile(shown.map(whole), 0.75));
  const group = workers.length * BAR + 10;
  const width = latest.length * group + 60;
  const scale = HEIGHT / (height || 1);
  const place = useRef(null);
  const newest = latest.at(-1);
  useEffect(() => {
    if (place.current) place.current.scrollLeft = place.current.scrollWidth; // on a narrow screen, to the newest
  }, [newest]);
  const text = `The latest ${latest.length} steps of ${names}; the longest took ${seconds(longest)}.`;
  return html`<div class="scroll" ref=${place} tabindex="0" role="region" aria-label="Bars of the latest steps">
    <svg class="steps" width=${width} height=${HEIGHT + 44} role="img"
        aria-label=${`${text} The table below has all of them.`}>
      <defs>
        ${["pull", "wait"].map(
          (phase) => html`<pattern id=${`hatch-${phase}`} width="5" height="5" patternUnits="userSpaceOnUse"
              patternTransform="rotate(45)">
            <rect width="5" height="5" class=${`ground ${phase}`} /><line x1="0" y1="0" x2="0" y2="5"
                class=${`hatch ${phase}`} />
          </pattern>`,
        )}
      </defs>
      ${[0.5, 1].map(
        (share) => html`<line
            class="grid" x1="52" x2=${width} y1=${20 + HEIGHT * (1 - share)} y2=${20 + HEIGHT * (1 - share)} />
          <text class="scale" x="46" y=${24 + HEIGHT * (1 - share)}>${seconds(height * share)}</text>`,
      )}
      ${latest.map((step, column) => {
        const there = at.filter(([, steps]) => steps.has(step)).map(([worker, steps]) => [worker, steps.get(step)]);
        const slowest = there.length > 1 ? there.reduce((a, b) => (b[1].own > a[1].own ? b : a))[0] : null;
        const left = 56 + column * group;
        return html`<g key=${step}>
          ${at.map(([worker, steps], row) => {
            const timing = steps.get(step);
            return timing && html`<${Stack} timing=${timing} worker=${worker} x=${left + row * BAR} scale=${scale}
                slowest=${worker === slowest} straggler=${worker === straggler} />`;
          })}
          <text class="step" x=${left + (workers.length * BAR) / 2} y=${HEIGHT + 36}>${count(step)}</text>
        </g>`;
      })}
    </svg>
  </div>
  <ul class="legend">
    ${PHASES.map((phase) => html`<li><svg class="key" width="14" height="14" aria-hidden="true"><rect width="14"
        height="14"
        class=${`phase ${phase}`} /></svg> ${phase}${FOR_OTHERS.includes(phase) ? " (waiting for others)" : ""}</li>`)}
    <li><span aria-hidden="true">▼</span> the slowest worker of a step, by its own part</li>
    ${height < longest && html`<li>A bar with a gap is longer than drawn.</li>`}
  </ul>
  <p class="soft">Each step's bars, from the left: ${names}.</p>`;
}

function Stack({ timing, worker, x, scale, slowest, straggler }) {
  let top = 20 + HEIGHT;
  const parts = PHASES.filter((phase) => timing[phase] > 0).map((phase) => {
    const height = Math.min(timing[phase] * scale, top - 20);
    top -= height;
    return html`<rect class=${`phase ${phase}`} x=${x} y=${top} width=${BAR - 2} height=${height} />`;
  });
  const words = PHASES.filter((phase) => timing[phase] > 0).map((phase) => `${phase} ${seconds(timing[phase])}`);
  const cut = whole(timing) * scale > HEIGHT + 1;
  return html`<g><title>${`${worker}, step ${count(timing.step)}: ${words.join(", ")}`}</title>${parts}
    ${cut && html`<rect class="ground" x=${x - 1} y="27" width=${BAR} height="4" />`}
    ${slowest && html`<text class=${`slowest ${straggler ? "straggler" : ""}`} x=${x + (BAR - 2) / 2}
        y=${top - 4}>▼</text>`}
  </g>`;
}

function Medians({ workers, straggler }) {
  const columns = [["Worker"], ...PHASES.map((phase) => [phase, "number"]), ["own part", "number"], ["slowest in", "number"]];
  const rows = workers.map(({ worker, steps, typical, slowest }) => {
    const of = (phase) => typical?.[phase] ?? median(steps.map((it) => it[phase]));
    return html`<tr key=${worker}>
      <th scope="row">${worker}${worker === straggler && html` <span class="state bad"><span
          aria-hidden="true">▼</span> straggler</span>`}</th>
      ${PHASES.map((phase) => html`<td class="number">${formatted(of(phase))}</td>`)}
      <td class="number"><strong>${formatted(of("own"))}</strong></td>
      <td class="number">${slowest === null ? "–" : `${Math.round(100 * slowest)}% of steps`}</td>
    </tr>`;
  });
  return html`<h3>A typical step</h3><${Table} label="Medians of each phase by worker" columns=${columns}
      rows=${rows} />`;
}

// What the bars show.
function Steps({ workers }) {
  const columns = [["Step", "number"], ["Worker"], ...PHASES.map((phase) => [phase, "number"])];
  const rows = latestSteps(workers).flatMap((step) =>
    workers.map(({ worker, steps }) => {
      const timing = steps.find((it) => it.step === step);
      return timing && html`<tr key=${`${step} ${worker}`}>
        <th scope="row" class="number">${count(step)}</th>
        <td>${worker}</td>
        ${PHASES.map((phase) => html`<td class="number">${formatted(timing[phase])}</td>`)}
      </tr>`;
    }),
  );
  return html`<${Table} label="Phases of each step" columns=${columns} rows=${rows.filter(Boolean)} />`;
}

const formatted = (value) => (value ? seconds(value) : "–");

const median = (values) => quantile(values, 0.5);

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor((sorted.length - 1) * share)];
}
