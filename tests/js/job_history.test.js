// What a page puts together of a job's events: curves, pace, log; and that all of it is bounded.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Points, JobHistory, mean, newer, smoothed } from "../../server/shoal_coordinator/page/static/job_history.js";

const reported = (time, samples, { worker = "w0", step = samples, loss = 1 } = {}) => ({
  event: "metrics",
  worker,
  step,
  values: { loss },
  progress: { samples },
  time,
});

function curve(pairs) {
  const points = new Points();
  for (const [step, value] of pairs) points.add(step, value);
  return points;
}

test("points are in order, and steps that are done again replace what was there", () => {
  const points = curve([[1, 10], [2, 20], [3, 30], [2, 21]]);
  assert.deepEqual([points.steps, points.values], [[1, 2], [10, 21]]);
});

test("a long curve is downsampled evenly, and its newest point stays", () => {
  const points = new Points();
  for (let step = 1; step <= 20_000; step += 1) {
    points.add(step, -step);
    assert.equal(points.steps.at(-1), step);
  }
  assert.ok(points.steps.length <= 4_000 && points.steps.length >= 2_000);
  assert.deepEqual(points.values, points.steps.map((step) => -step));
});

test("the pace is that of the last reports", () => {
  const history = new JobHistory();
  assert.equal(history.samplesPerS(5), null);
  history.add([reported(100, 0)]);
  assert.equal(history.samplesPerS(100), null, "one report says nothing");
  history.add([reported(102, 50), reported(104, 100)]);
  assert.equal(history.samplesPerS(104), 25);
  for (let time = 105; time <= 120; time += 1) history.add([reported(time, 100 + 10 * (time - 104))]);
  assert.equal(history.samplesPerS(120), 10, "what was long ago does not count");
});

test("a job that stands still has a pace of 0", () => {
  const history = new JobHistory();
  assert.equal(history.silence(7), null);
  history.add([reported(100, 0), reported(101, 50)]);
  assert.deepEqual([history.samplesPerS(105), history.stalled(105), history.silence(105)], [50, false, 4]);
  assert.deepEqual([history.samplesPerS(112), history.stalled(112), history.silence(112)], [0, true, 11]);
  history.add([reported(113, 60)]);
  assert.ok(history.samplesPerS(113) > 0);
});

test("a job whose steps are long does not stand still between them", () => {
  const history = new JobHistory();
  history.add([reported(0, 0), reported(60, 600)]);
  assert.equal(history.samplesPerS(200), 10);
  assert.equal(history.samplesPerS(260), 0);
});

test("curves by metric and worker, evaluations of the job", () => {
  const history = new JobHistory();
  history.add([
    reported(1, 1, { loss: 3 }),
    reported(2, 1, { loss: 5, worker: "w1" }),
    { event: "evaluation", result: { step: 7, values: { accuracy: 0.5 } } },
    { event: "state", state: "running" },
  ]);
  assert.deepEqual([...history.metrics.get("loss").keys()], ["w0", "w1"]);
  assert.deepEqual(history.evaluations.get("accuracy").steps, [7]);
  const { version } = history;
  history.add([]);
  assert.notEqual(history.version, version);
  history.clear();
  assert.deepEqual([history.metrics.size, history.evaluations.size, history.reportedAt], [0, 0, null]);
});

test("metrics, workers and lines are bounded", () => {
  const history = new JobHistory();
  for (let number = 0; number < 100; number += 1) {
    history.add([{ ...reported(number, number, { worker: `w${number}` }), values: { loss: 1, [`f${number}`]: 1 } }]);
  }
  assert.deepEqual([history.metrics.size, history.metrics.get("loss").size], [12, 64]);
  history.add(Array.from({ length: 3_000 }, (_, sequence) => ({ event: "log", sequence, worker: "w0", text: "", time: 0 })));
  assert.deepEqual([history.lines.length, history.lines[0].sequence], [2_000, 1_000]);
});

test("how many lines came behind those that are held", () => {
  const line = (sequence) => ({ sequence, worker: `w${sequence % 2}` });
  const lines = (first, last) => Array.from({ length: last - first + 1 }, (_, index) => line(first + index));
  assert.equal(newer(lines(1, 10), lines(1, 10), ""), 0);
  assert.equal(newer(lines(1, 10), lines(1, 11), ""), "1 new line");
  assert.equal(newer(lines(1, 10), lines(1, 14), "w1"), "2 new lines");
  assert.equal(newer([], lines(1, 3), ""), "3 new lines");
  assert.equal(newer(lines(1, 2_000), lines(2_002, 4_001), ""), "over 2,000 new lines", "some are not kept");
});

test("the mean of curves whose steps are others", () => {
  assert.deepEqual(mean([]), [[], []]);
  assert.deepEqual(mean([curve([[1, 1], [2, 2]]), curve([[1, 3], [2, 4]])]), [[1, 2], [2, 3]]);
  assert.deepEqual(mean([curve([[1, null], [2, 2]])]), [[2], [2]], "what is not finite is left out");
  const [steps] = mean([curve(Array.from({ length: 1_000 }, (_, step) => [step, 0]))], 10);
  assert.equal(steps.length, 10);
});

test("smoothing leaves out what is not finite", () => {
  assert.deepEqual(smoothed([null, 4, null, 8], 0.5), [null, 4, null, 6]);
});
