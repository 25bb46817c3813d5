// The stored checkpoints of a job, newest first.

import { jobPath, usePolled } from "./api.js";
import { bytes, count, moment } from "./format.js";
import { html } from "./html.js";
import { Card, Table } from "./parts.js";

export function CheckpointList({ job, history }) {
  // Changes with the newest checkpoint and with the end of an attempt, so that the list is read again.
  const mark = `${job.checkpoint?.number ?? 0} ${history.happenings.at(-1)?.sequence ?? 0} ${job.state}`;
  const { value, error } = usePolled(jobPath(job.name, "checkpoints"), 0, false, mark);
  const columns = [["Number", "number"], ["Step", "number"], ["Bytes", "number"], ["Taken"], ["", ""]];
  const rows = (value?.checkpoints ?? []).map((it) =>
    it.error
      ? html`<tr key=${it.number}><th scope="row" class="number">${it.number}</th><td colspan="4"
          class="bad">${it.error.message}</td></tr>`
      : html`<tr key=${it.number}>
          <th scope="row" class="number">${it.number}</th>
          <td class="number">${count(it.step)}</td>
          <td class="number">${bytes(it.bytes)}</td>
          <td>${moment(it.created_at)}</td>
          <td>${it.evaluation && html`<span class="state good"><span aria-hidden="true">★</span> best</span>`}</td>
        </tr>`,
  );
  const none = value && !value.folder
    ? "None: the cluster has no checkpoint storage. Start it with --checkpoints."
    : (error?.message ?? "None yet.");
  return html`<${Card} id="checkpoints" title="Checkpoints">
    ${job.checkpoint_failure && html`<p class="bad">The latest attempt failed: ${job.checkpoint_failure}</p>`}
    <${Table} label="Checkpoints" columns=${columns} rows=${rows} empty=${none} />
    ${value?.folder && html`<p class="soft">In <code>${value.folder}</code></p>`}
  <//>`;
}
