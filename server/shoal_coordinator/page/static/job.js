// The page of one job.

import { get, jobPath, usePolled } from "./api.js";
import { Actions } from "./actions.js";
import { CheckpointList } from "./checkpoints.js";
import { Curves } from "./curves.js";
import { Data } from "./data.js";
import { count, duration, metric, moment, plural, rate } from "./format.js";
import { HybridGroups } from "./groups.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { JobHistory } from "./job_history.js";
import { Log } from "./log.js";
import { WorkerTable } from "./members.js";
import { Card, State, Tile, LiveRegion, isFinished } from "./parts.js";
import { Staleness } from "./staleness.js";
import { follow } from "./stream.js";
import { Timeline } from "./timeline.js";

export function JobPage({ name, acts, tell }) {
  const history = useRef(new JobHistory()).current;
  const [seen, setSeen] = useState(null);
  const [refused, setRefused] = useState(null);
  const [, setVersion] = useState(0);
  const cluster = useCluster();
  const live = seen !== null && !isFinished(seen.job.state) && !refused;
  const timings = usePolled(jobPath(name, "timings"), 2, live);
  useEffect(() => {
    document.title = `${name} · Shoal`;
    const on = {
      begin: ({ fresh }) => fresh && history.clear(),
      events: (events) => {
        history.add(events);
        setVersion(history.version);
      },
      job: (update) => {
        document.title = `${update.job.name}: ${update.job.state} · Shoal`;
        setSeen(update);
      },
      refused: setRefused,
    };
    return follow(jobPath(name, "events"), on, tell);
  }, [name]);
  if (refused && !seen) return html`<${Unknown} name=${name} />`;
  if (!seen) return html`<${Back} /><h1><bdi>${name}</bdi></h1><p class="empty">Loading …</p>`;
  const { job, workers, time } = seen;
  const states = { [`job ${name}`]: job.state };
  for (const it of workers) states[it.member] = it.state;
  return html`
    <${Back} />
    <${LiveRegion} states=${states} announce=${(name, state) => `${name} is ${state}`} />
    <div class="title">
      <h1><bdi>${job.name}</bdi></h1> <${State} state=${job.state} />
      ${acts && !cluster.read_only && html`<${Actions} name=${name} live=${live} />`}
    </div>
    ${refused && html`<p class="banner" role="alert">${refused.message}</p>`}
    ${job.reason && html`<pre class=${job.state === "failed" ? "reason bad" : "reason"}>${job.reason}</pre>`}
    ${job.restore_note && html`<pre class="reason">${job.restore_note}</pre>`}
    <${Progress} job=${job} live=${live} />
    <${Metrics} job=${job} history=${history} live=${live} now=${time} />
    <div class="cards">
      <${Curves} history=${history} />
      <${Timeline} timings=${timings} />
      <${HybridGroups} timings=${timings} />
      <${Card} id="workers" title="Workers">
        <${WorkerTable} members=${workers} now=${time} withJob=${false} />
      <//>
      <${Staleness} timings=${timings} />
      <${Data} name=${name} live=${live} mark=${job.state} />
      <${CheckpointList} job=${job} history=${history} />
      <${Log} history=${history} />
      <${Settings} job=${job} />
    </div>
  `;
}

const Back = () => html`<nav aria-label="Back"><a href="/">← Cluster and jobs</a></nav>`;

function Unknown({ name }) {
  document.title = "Unknown job · Shoal";
  return html`<section class="lost">
    <h1>Unknown job <bdi>${name}</bdi></h1>
    <p>Check the spelling of its name. The job may also have been dropped.</p>
    <p><a href="/">Go to the cluster and its jobs</a></p>
  </section>`;
}

// A hook that reads what does not change while a coordinator runs, such as whether actions are allowed.
function useCluster() {
  const [cluster, setCluster] = useState({ read_only: true });
  useEffect(() => {
    let timer = 0;
    const again = (error) => {
      if (!(error.status >= 400 && error.status < 500)) timer = setTimeout(ask, 2_000); // the coordinator will not answer a refused request later either
    };
    const ask = () => get("/api/cluster").then(setCluster, again);
    ask();
    return () => clearTimeout(timer);
  }, []);
  return cluster;
}

function Progress({ job, live }) {
  const { samples, total_samples: total, seconds_left: left, epoch } = job.progress;
  if (!total) return "";
  const percent = Math.floor(Math.min(1, samples / total) * 100);
  const when = live && left !== null ? `, ${duration(left)} left` : "";
  const text = `${percent}%: ${count(samples)} of ${count(total)} samples, epoch ${epoch + 1} of ${job.epochs}${when}`;
  return html`<div class="progress">
    <progress max=${total} value=${Math.min(samples, total)} aria-label="Progress">${percent}%</progress>
    <p>${text}</p>
  </div>`;
}

// The tiles of a job. `now` is by the coordinator's clock, as are all times on the page.
function Metrics({ job, history, live, now }) {
  const { progress, evaluation, best } = job;
  const pace = live ? history.samplesPerS(now) : null;
  const took = (job.finished_at || now) - job.started_at;
  return html`<dl class="tiles">
    <${Tile} label="Loss" value=${progress.steps ? metric(progress.loss) : "–"}
        note=" mean of the latest report" />
    ${Object.entries(evaluation?.values ?? {})
      .slice(0, 3)
      .map(([name, value]) => html`<${Tile} label=${`Held out: ${name}`} value=${metric(value)}
          note=${best && ` ${metric(best.values[name])} at best, step ${count(best.step)}`} />`)}
    <${Tile} label="Samples/s" value=${rate(pace ?? progress.samples_per_s ?? 0)}
        note=${pace === null ? "" : ` ${rate(progress.samples_per_s ?? 0)} on average`} />
    ${live && history.reportedAt !== null && html`<${Tile} label="Last report" value=${`${duration(history.silence(now))} ago`}
        note=${history.stalled(now) ? " overdue" : ""} />`}
    <${Tile} label="Updates" value=${count(progress.steps)} note=${lost(progress)} />
    <${Tile} label="Staleness" value=${count(progress.staleness_p50)}
        note=${` at most ${count(progress.staleness_max)}`} />
    ${job.started_at > 0 && html`<${Tile} label=${live ? "Running for" : "Ran for"} value=${duration(took)}
        note=${job.restarts ? ` ${plural(job.restarts, "restart")}` : ""} />`}
  </dl>`;
}

function lost({ rejected, dropped, lost_steps: lost }) {
  return [
    rejected && ` ${count(rejected)} rejected`,
    dropped && ` ${count(dropped)} too late`,
    lost && ` ${count(lost)} lost at restarts`,
  ]
    .filter(Boolean)
    .join(",");
}

function Settings({ job }) {
  const settings = [
    ...job.specification.map(({ label, value }) => [label, value]),
    ["Submitted", moment(job.submitted_at)],
    ...Object.entries(job.settings).map(([name, value]) => [`Setting ${name}`, JSON.stringify(value)]),
  ];
  return html`<${Card} id="settings" title="As submitted" wide>
    <dl class="settings">${settings.map(([name, value]) => html`<div><dt>${name}</dt><dd><bdi>${String(value)}</bdi></dd></div>`)}</dl>
  <//>`;
}
