// The table of jobs.

import { duration, metric, metrics, moment, rate } from "./format.js";
import { html } from "./html.js";
import { Bar, State, Table, isFinished } from "./parts.js";

const COLUMNS = [
  ["Job"],
  ["State"],
  ["Progress"],
  ["Samples/s", "number"],
  ["Loss", "number"],
  ["Evaluation"],
  ["Workers", "number"],
  ["Submitted"],
];

export function JobTable({ jobs, counted }) {
  const rows = jobs.map((job) => html`<${Row} key=${`${job.name} ${job.submitted_at}`} job=${job} />`);
  return html`
    <${Table} label="Jobs" columns=${COLUMNS} rows=${rows} empty="No jobs yet. Run shoal submit to start one." />
    ${counted > jobs.length && html`<p
        class="soft">Showing the newest ${jobs.length} of ${counted}. shoal jobs lists all.</p>`}
  `;
}

function Row({ job }) {
  const { progress } = job;
  const share = progress.total_samples ? progress.samples / progress.total_samples : 0;
  return html`<tr data-job=${job.name}>
    <th scope="row"><a href=${`/jobs/${encodeURIComponent(job.name)}`}>${job.name}</a></th>
    <td><${State} state=${job.state} />${job.reason && html`<small class="why">${job.reason}</small>`}</td>
    <td><${Share} share=${share} left=${progress.seconds_left} over=${isFinished(job.state)} /></td>
    <td class="number">${rate(progress.samples_per_s ?? 0)}</td>
    <td class="number">${progress.steps ? metric(progress.loss) : ""}</td>
    <td>${job.evaluation ? metrics(job.evaluation.values) : ""}</td>
    <td class="number">${job.workers.length} of ${job.workers_wanted}</td>
    <td>${moment(job.submitted_at)}</td>
  </tr>`;
}

function Share({ share, left, over }) {
  if (!share) return "";
  const percent = `${Math.floor(Math.min(1, share) * 100)}%`;
  const text = over || left === null ? percent : `${percent}, ${duration(left)} left`;
  return html`<${Bar} share=${share} label=${text} /> <small aria-hidden="true">${text}</small>`;
}
