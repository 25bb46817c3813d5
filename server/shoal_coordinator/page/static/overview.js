// The page of the cluster: its members, the load of its servers, and its jobs.

import { usePolled } from "./api.js";
import { bytes, plural } from "./format.js";
import { ElasticGroups } from "./groups.js";
import { html, useEffect, useState } from "./html.js";
import { JobTable } from "./jobs.js";
import { ServerTable, WorkerTable } from "./members.js";
import { Card, Tile, LiveRegion, alive } from "./parts.js";
import { follow } from "./stream.js";

export function Overview({ tell }) {
  const [seen, setSeen] = useState(null);
  const groups = usePolled("/api/groups", 2, true);
  useEffect(() => {
    document.title = "Cluster · Shoal";
    return follow("/api/events", { cluster: setSeen }, tell);
  }, []);
  if (!seen) return html`<h1>Cluster</h1><p class="empty">Loading …</p>`;
  const { cluster, jobs, time } = seen;
  const { counts } = cluster;
  const servers = cluster.members.filter((member) => member.role === "server");
  const workers = cluster.members.filter((member) => member.role !== "server");
  const states = Object.fromEntries(cluster.members.map((it) => [it.member, it.state]));
  for (const job of jobs) states[`job ${job.name}`] = job.state;
  return html`
    <div class="title"><h1>Cluster</h1><p
        class="soft"><code>${cluster.cluster}</code> · Shoal ${cluster.version}</p></div>
    <${LiveRegion} states=${states} announce=${(name, state) => `${name} is ${state}`} />
    <dl class="tiles">
      <${Tile} label="Jobs running" value=${counts.jobs_by_state.running ?? 0} note=${otherJobs(counts)} />
      <${Living} label="Workers" states=${counts.members_by_state.worker} />
      <${Living} label="Servers" states=${counts.members_by_state.server} />
      <${Tile} label="Shards" value=${cluster.shards} note=${` generation ${cluster.generation}`} />
      <${Tile} label="Memory on servers" value=${bytes(cluster.bytes)} />
    </dl>
    <${Card} id="jobs" title="Jobs"><${JobTable} jobs=${jobs} counted=${counts.jobs} /><//>
    <${ElasticGroups} groups=${groups} />
    <${Card} id="workers" title="Workers">
      <${WorkerTable} members=${workers} now=${time} />
    <//>
    <${Card} id="servers" title="Servers">
      <${ServerTable} members=${servers} now=${time} />
    <//>
    ${counts.members > cluster.members.length &&
    html`<p class="soft">${plural(counts.members, "member")}; showing the first ${cluster.members.length}.</p>`}
  `;
}

function Living({ label, states = {} }) {
  const others = ["late", "draining", "left", "lost"].filter((state) => states[state]);
  const note = others.length ? others.map((state) => ` ${states[state]} ${state}`).join(",") : " alive";
  return html`<${Tile} label=${label} value=${alive(states)} note=${note} />`;
}

// Returns the number of jobs that wait, and of all jobs, as text.
export function otherJobs({ jobs, jobs_by_state: states }) {
  const waiting = ["pending", "starting", "placing"].reduce((sum, state) => sum + (states[state] ?? 0), 0);
  return `${waiting ? ` ${waiting} waiting,` : ""} of ${jobs}`;
}
