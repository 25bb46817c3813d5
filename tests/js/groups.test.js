// What the page says of groups of ranks: their generation, the straggler, and the share of a phase.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ElasticGroups, HybridGroups, share, state, verdict } from "../../server/shoal_coordinator/page/static/groups.js";

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
