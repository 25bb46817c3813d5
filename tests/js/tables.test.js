// Small decisions of the page's tables: words of states, counts, the bins of a histogram.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ServerTable } from "../../server/shoal_coordinator/page/static/members.js";
import { otherJobs } from "../../server/shoal_coordinator/page/static/overview.js";
import { alive, isFinished, stateText } from "../../server/shoal_coordinator/page/static/parts.js";
import { binned } from "../../server/shoal_coordinator/page/static/staleness.js";

test("a state says since when, if it is not as it should be", () => {
  const told = (state) => stateText({ state, silent_s: 3 }, Date.parse("2021-06-02T03:04:05") / 1e3);
  assert.deepEqual(["alive", "late", "draining", "left", "lost"].map(told), [
    "alive",
    "late, silent for 3 s",
    "draining",
    "left at 03:04:02",
    "lost, silent since 03:04:02",
  ]);
});

test("a draining server says what is left", () => {
  const told = (more) => stateText({ state: "draining", silent_s: 0, ...more }, 0);
  assert.equal(told({ waiting_jobs: ["a", "b"] }), "draining: 2 jobs left");
  assert.equal(told({ drained: true, waiting_jobs: [] }), "draining: nothing left");
});

test("who is there, by state", () => {
  assert.equal(alive(), 0);
  assert.equal(alive({ alive: 3, late: 1, draining: 1, left: 5, lost: 7 }), 5);
});

test("jobs that do not run", () => {
  assert.equal(otherJobs({ jobs: 2, jobs_by_state: { running: 2 } }), " of 2");
  assert.equal(otherJobs({ jobs: 9, jobs_by_state: { running: 2, pending: 1, placing: 1, failed: 5 } }), " 2 waiting, of 9");
  assert.deepEqual(["running", "failed", "pending"].map(isFinished), [false, true, false]);
});

test("few kinds of staleness have a row each, those without a push too", () => {
  assert.deepEqual(binned([]), []);
  assert.deepEqual(binned([[0, 5], [2, 1]]), [
    { label: "0", pushes: 5 },
    { label: "1", pushes: 0 },
    { label: "2", pushes: 1 },
  ]);
});

test("many are put together, and none is lost", () => {
  const bins = binned(Array.from({ length: 100 }, (_, versions) => [versions, 2]));
  assert.ok(bins.length <= 12);
  assert.deepEqual([bins[0].label, bins.reduce((sum, it) => sum + it.pushes, 0)], ["0–8", 200]);
});

test("servers have a column with their zones if one states a zone", () => {
  const server = { member: "s0", alive: true, state: "alive", silent_s: 0, shards: 1, bytes: 1, load: { waiting_pulls: 0 }, address: "h:1" };
  const columns = (members) => ServerTable({ members, now: 0 }).props.columns.map(([name]) => name);
  assert.equal(columns([{ ...server, zone: "" }]).at(-1), "Address");
  assert.equal(columns([{ ...server, zone: "" }, { ...server, zone: "rack-4" }]).at(-1), "Zone");
});
