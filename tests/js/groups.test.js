// What the page says of groups of ranks: their generation, the straggler, and the share of a phase.

import assert from "node:assert/strict";
import { test } from "node:test";

import { bubbleText, ElasticGroups, HybridGroups, share, state, verdict } from "../../server/shoal_coordinator/page/static/groups.js";

test("a group has a generation, or waits for one", () => {
  const group = { generation: 2, size: 3, most_ranks: 4, waits_for: "" };
  assert.equal(state(group), "Generation 2 has 3 of 4 ranks.");
  assert.equal(state({ ...group, waits_for: "rank 1 (h:1)" }), "Generation 3 waits for rank 1 (h:1).");
});

test("the late rank is named", () => {
  const late = { straggler: { rank: 1, seconds: 0.008 }, waits_for: "" };
  assert.equal(verdict(late), "Rank 1 is the straggler: the others wait 8.00 ms for it in each call.");
  assert.equal(verdict({ straggler: null }), "No rank is a straggler.");
  assert.equal(verdict({ straggler: null, waits_for: "rank 1 (h:1)" }), "");
});

test("shares of the time, also of a rank that has told none yet", () => {
  assert.equal(share({ seconds: 60, wait: 15 }, "wait"), 0.25);
  assert.equal(share({ seconds: 0, wait: 0 }, "wait"), 0);
});

test("a cluster or a job without groups has no section for them", () => {
  for (const value of [null, { groups: [] }]) assert.equal(ElasticGroups({ groups: { value } }), "");
  for (const value of [null, { workers: [{ group: null }] }]) assert.equal(HybridGroups({ timings: { value } }), "");
});

// Returns the text of what a component without hooks shows.
function textOf(node) {
  if (Array.isArray(node)) return node.map(textOf).join(" ");
  if (node === null || node === undefined || typeof node === "boolean") return "";
  if (typeof node !== "object") return String(node);
  return textOf(typeof node.type === "function" ? node.type(node.props) : node.props.children);
}

test("each rank has a row with its times", () => {
  const times = { seconds: 60, steps: 50, calls: 1000, local_reduce: 0, transfer: 2 };
  const ranks = [{ rank: 0, ...times, wait: 9 }, { rank: 1, ...times, wait: 1 }];
  const straggler = { rank: 1, seconds: 0.008 };
  const shown = textOf(HybridGroups({ timings: { value: { workers: [{ worker: "job-group-0", group: { straggler, ranks } }] } } }));
  assert.match(shown, /job-group-0 .*Rank 1 is the straggler/s);
  assert.match(shown, /1\s+▼\s+straggler\s+50\s+1,000\s+0 µs\s+1\.0 s\s+2\.0 s/);
  const group = { name: "train", generation: 1, size: 2, most_ranks: 2, waits_for: "", straggler };
  const elastic = ranks.map((it) => ({ ...it, address: `host-${it.rank}:1` }));
  assert.match(textOf(ElasticGroups({ groups: { value: { groups: [{ ...group, ranks: elastic }] } } })), /Address .*host-1:1/s);
  assert.match(textOf(ElasticGroups({ groups: { value: { groups: [{ ...group, ranks: null }] } } })), /Generation 1 has 2 of 2 ranks\./);
});

test("stages of a pipeline have their bubble, beside that of equal stages", () => {
  const bubble = { measured: 0.475, ideal: 0.2, stages: 2, micro_batches: 4 };
  const text = "Bubble: the stages wait 47.5% of a step. Equal stages would wait 20.0% with 4 micro-batches, and 11.1% with 8.";
  assert.equal(bubbleText(bubble), text);
  assert.match(bubbleText({ ...bubble, measured: null, micro_batches: 1 }), /^No step .* with 1 micro-batch, and 33\.3% with 2\.$/);
  const times = { seconds: 60, steps: 50, calls: 1000, local_reduce: 0, wait: 9, transfer: 2 };
  const ranks = [0, 1].map((rank) => ({ rank, ...times, stage: { stage: rank }, bubble: rank ? 0.7 : null }));
  const shown = textOf(HybridGroups({ timings: { value: { workers: [{ worker: "w", group: { straggler: null, bubble, ranks } }] } } }));
  assert.match(shown, /Bubble: the stages wait 47\.5%/);
  assert.match(shown, /Stage\s+Bubble/);
  assert.match(shown, /0\s+–.*1\s+70\.0%/s);
});
