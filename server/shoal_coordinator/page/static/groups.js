// Groups of ranks: the elastic groups of the cluster, and the hybrid groups of a job, with the times of their ranks.

import { count, plural, seconds } from "./format.js";
import { html } from "./html.js";
import { Bar, Card, Table } from "./parts.js";

const PHASES = [
  ["local_reduce", "local reduce"],
  ["wait", "wait"],
  ["transfer", "transfer"],
];

// The elastic groups. `groups` is the result of `usePolled`. A cluster without any has no such section.
export function ElasticGroups({ groups: { value } }) {
  if (!value?.groups.length) return "";
  return html`<${Card} id="groups" title="Elastic groups" wide>
    ${value.groups.map(
      (group) => html`<section key=${group.name} data-group=${group.name}>
        <h3><bdi>${group.name}</bdi></h3>
        <p class="verdict" data-straggler=${group.straggler?.rank ?? ""}>${state(group)} ${verdict(group)}</p>
        ${bubbleLine(group)}
        ${group.ranks && html`<${RankTable} of=${group.name} ranks=${group.ranks} straggler=${group.straggler} />`}
      </section>`,
    )}
  <//>`;
}

// The hybrid groups of a job. `timings` is the result of `usePolled`. A job without any has no such section.
export function HybridGroups({ timings: { value } }) {
  const sharing = (value?.workers ?? []).filter((it) => it.group);
  if (!sharing.length) return "";
  return html`<${Card} id="hybrid-groups" title="Hybrid groups" wide>
    ${sharing.map(
      ({ worker, group }) => html`<section key=${worker} data-group=${worker}>
        <h3><bdi>${worker}</bdi></h3>
        <p class="verdict" data-straggler=${group.straggler?.rank ?? ""}>${verdict(group)}</p>
        ${bubbleLine(group)}
        <${RankTable} of=${worker} ranks=${group.ranks} straggler=${group.straggler} />
      </section>`,
    )}
  <//>`;
}

export function state({ generation, size, most_ranks: most, waits_for: waitsFor }) {
  if (waitsFor) return `Generation ${count(generation + 1)} waits for ${waitsFor}.`;
  return `Generation ${count(generation)} has ${count(size)} of ${plural(most, "rank")}.`;
}

export function verdict({ straggler, waits_for: waitsFor }) {
  if (straggler) {
    return `Rank ${straggler.rank} is the straggler: the others wait ${seconds(straggler.seconds)} for it in each call.`;
  }
  return waitsFor ? "" : "No rank is a straggler.";
}

// What the stages of a pipeline have waited, and what equal stages would wait, also with more micro-batches.
export function bubbleText({ measured, ideal, stages, micro_batches: batches }) {
  const found = measured === null ? "No step of the pipeline has ended in the last minute." :
    `Bubble: the stages wait ${asPercent(measured)} of a step.`;
  const more = (stages - 1) / (2 * batches + stages - 1);
  return `${found} Equal stages would wait ${asPercent(ideal)} with ${plural(batches, "micro-batch", "micro-batches")}, and ` +
    `${asPercent(more)} with ${count(2 * batches)}.`;
}

const bubbleLine = ({ bubble }) => bubble && html`<p class="bubble">${bubbleText(bubble)}</p>`;

const asPercent = (part) => `${(100 * part).toFixed(1)}%`;

function RankTable({ of, ranks, straggler }) {
  const staged = ranks.some((it) => it.stage);
  const columns = [["Rank"], ["Steps", "number"], ["Calls", "number"], ...PHASES.map(([, name]) => [name, "number"])];
  if (staged) columns.push(["Stage", "number"], ["Bubble", "number"]);
  if (ranks[0]?.address) columns.push(["Address"]);
  const rows = ranks.map(
    (it) => html`<tr key=${it.rank}>
      <th scope="row">${it.rank}${it.rank === straggler?.rank && html` <span class="state bad"><span
          aria-hidden="true">▼</span> straggler</span>`}</th>
      <td class="number">${count(it.steps)}</td>
      <td class="number">${count(it.calls)}</td>
      ${PHASES.map(([phase, name]) => html`<td class="number">${seconds(it[phase])} <${Bar}
          share=${share(it, phase)} label=${`${percent(it, phase)}% of the time: ${name}`} /></td>`)}
      ${staged && html`<td class="number">${it.stage ? it.stage.stage : "–"}</td>
        <td class="number">${it.bubble === null ? "–" : asPercent(it.bubble)}</td>`}
      ${it.address && html`<td>${it.address}</td>`}
    </tr>`,
  );
  return html`<${Table} label=${`Times of the ranks of ${of} in the last minute`} columns=${columns} rows=${rows}
      empty="No ranks yet." />`;
}

export const share = (times, phase) => (times.seconds > 0 ? times[phase] / times.seconds : 0);

const percent = (times, phase) => Math.round(100 * share(times, phase));
