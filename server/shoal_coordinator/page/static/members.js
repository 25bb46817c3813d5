// Tables of workers and of servers.

import { bytes, count, rate } from "./format.js";
import { html } from "./html.js";
import { Bar, MemberState, Table } from "./parts.js";

const jobLink = (name) => name && html`<a href=${`/jobs/${encodeURIComponent(name)}`}>${name}</a>`;

export function WorkerTable({ members, now, withJob = true }) {
  const columns = [["Worker"], ["State"], ["Device"], ...(withJob ? [["Works on"]] : [])];
  const rows = members.map(
    (it) => html`<tr key=${it.member} class=${it.alive ? "" : "gone"} data-member=${it.member}>
      <th scope="row">${it.member}${it.role === "session" && html` <small>session</small>`}</th>
      <td><${MemberState} member=${it} now=${now} /></td>
      <td>${it.device}</td>
      ${withJob && html`<td>${jobLink(it.job)}</td>`}
    </tr>`,
  );
  return html`<${Table} label="Workers" columns=${columns} rows=${rows} empty="No workers yet." />`;
}

export function ServerTable({ members, now }) {
  const most = Math.max(1, ...members.map((it) => it.bytes));
  const zoned = members.some((it) => it.zone);
  const columns = [
    ["Server"],
    ["State"],
    ["Shards", "number"],
    ["Bytes", "number"],
    ["Updates/s", "number"],
    ["In", "number"],
    ["Out", "number"],
    ["Waiting pulls", "number"],
    ["Address"],
    ...(zoned ? [["Zone"]] : []),
  ];
  const rows = members.map((it) => {
    const rateOf = (name, text) => (it.rates ? text(it.rates[name]) : "–");
    return html`<tr key=${it.member} class=${it.alive ? "" : "gone"} data-member=${it.member}>
      <th scope="row">${it.member}</th>
      <td><${MemberState} member=${it} now=${now} /></td>
      <td class="number">${count(it.shards)}</td>
      <td class="number">${bytes(it.bytes)} <${Bar} share=${it.bytes / most}
          label=${`${Math.round((100 * it.bytes) / most)}% of the fullest`} /></td>
      <td class="number">${rateOf("updates", rate)}</td>
      <td class="number">${rateOf("received_bytes", (it) => `${bytes(it)}/s`)}</td>
      <td class="number">${rateOf("sent_bytes", (it) => `${bytes(it)}/s`)}</td>
      <td class="number">${count(it.load.waiting_pulls)}</td>
      <td>${it.address}</td>
      ${zoned && html`<td>${it.zone}</td>`}
    </tr>`;
  });
  return html`<${Table} label="Servers" columns=${columns} rows=${rows} empty="No servers yet." />`;
}
