// The account of a job's data, by epoch.

import { jobPath, usePolled } from "./api.js";
import { count, epochsDone, plural } from "./format.js";
import { html } from "./html.js";
import { Card, Numbers, Table } from "./parts.js";

const KINDS = [
  ["done", "trained on"],
  ["leased", "held by workers"],
  ["requeued", "requeued"],
  ["unleased", "not leased yet"],
];
const MAX_EPOCHS = 8;

export function Data({ name, live, mark }) {
  const { value, error } = usePolled(jobPath(name, "data"), 2, live, mark);
  if (!value?.samples) {
    const why = error && !value ? error.message : "The job has no data set, or no worker has loaded it yet.";
    return html`<${Card} id="data" title="Data"><p class="empty">${why}</p><//>`;
  }
  const begun = value.in_progress.slice(0, MAX_EPOCHS);
  return html`<${Card} id="data" title="Data">
    <p>${plural(value.samples, "sample")} in each epoch; ${count(epochsDone(value))} of ${plural(value.epochs, "epoch")} ${value.epochs === 1 ? "is" : "are"} done.</p>
    <${Share} label="All epochs" counts=${value.total} />
    ${begun.map((it) => html`<${Share} key=${it.epoch} label=${`Epoch ${it.epoch + 1}`} counts=${it} />`)}
    <ul class="legend">${KINDS.map(([kind, words]) => html`<li><span class=${`key ${kind}`}
        aria-hidden="true"></span> ${words}</li>`)}</ul>
    <${Numbers} title="Data">${() => html`<${Samples} value=${value} begun=${begun} />`}<//>
  <//>`;
}

function Samples({ value, begun }) {
  const columns = [["Samples"], ...KINDS.map(([, words]) => [words, "number"])];
  const all = [{ label: "All epochs", ...value.total }, ...begun.map((it) => ({ label: `Epoch ${it.epoch + 1}`, ...it }))];
  const rows = all.map(
    (it) => html`<tr key=${it.label}>
      <th scope="row">${it.label}</th>
      ${KINDS.map(([kind]) => html`<td class="number">${count(it[kind])}</td>`)}
    </tr>`,
  );
  return html`<${Table} label="Samples by state" columns=${columns} rows=${rows} />`;
}

function Share({ label, counts }) {
  const all = KINDS.reduce((sum, [kind]) => sum + counts[kind], 0) || 1;
  const shares = KINDS.filter(([kind]) => counts[kind]).map(([kind, words]) => `${count(counts[kind])} ${words}`);
  return html`<div class="share">
    <p><strong>${label}</strong> <span class="soft">${Math.floor((100 * counts.done) / all)}% done</span></p>
    <div class="stack" role="img" aria-label=${`${label}: ${shares.join(", ")}`} title=${shares.join(", ")}>
      ${KINDS.map(([kind]) => html`<span class=${kind} style=${{ width: `${(100 * counts[kind]) / all}%` }}></span>`)}
    </div>
  </div>`;
}
