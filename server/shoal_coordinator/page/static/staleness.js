// The staleness of accepted pushes: a table whose bars form the histogram.

import { count } from "./format.js";
import { html } from "./html.js";
import { Bar, Card, Table } from "./parts.js";

const MAX_ROWS = 12;

// `timings` is the result of `usePolled`.
export function Staleness({ timings: { value, error } }) {
  const found = Object.entries(value?.staleness ?? {}).map(([versions, pushes]) => [Number(versions), pushes]);
  const rows = binned(found.sort(([a], [b]) => a - b));
  const most = Math.max(1, ...rows.map((it) => it.pushes));
  const columns = [["Versions", "number"], ["Share of the largest"], ["Pushes", "number"]];
  return html`<${Card} id="staleness" title="Staleness of pushes">
    <${Table} label="Staleness" columns=${columns} empty=${error && !value ? error.message : "No pushes yet."}
      rows=${rows.map(
        (it) => html`<tr key=${it.label}>
          <th scope="row" class="number">${it.label}</th>
          <td class="grow"><${Bar} share=${it.pushes / most} label=${`${((100 * it.pushes) / most).toFixed(1)}% of the largest`} /></td>
          <td class="number">${count(it.pushes)}</td>
        </tr>`,
      )} />
  <//>`;
}

// Returns bins of equal width, at most MAX_ROWS.
export function binned(found) {
  if (!found.length) return [];
  const last = found.at(-1)[0];
  const width = Math.ceil((last + 1) / MAX_ROWS);
  const bins = Array.from({ length: Math.floor(last / width) + 1 }, (_, bin) => ({
    label: width === 1 ? `${bin}` : `${bin * width}–${(bin + 1) * width - 1}`,
    pushes: 0,
  }));
  for (const [versions, pushes] of found) bins[Math.floor(versions / width)].pushes += pushes;
  return bins;
}
