// Numbers and times as people read them, wherever they live.

import assert from "node:assert/strict";
import { test } from "node:test";

import { bytes, duration, epochsDone, metric, moment, plural, rate, seconds } from "../../server/shoal_coordinator/page/static/format.js";

const at = (text) => Date.parse(text) / 1e3;

test("a moment has the date of the reader's own clock", () => {
  const before = process.env.TZ;
  process.env.TZ = "America/Los_Angeles"; // 7 hours behind
  try {
    assert.equal(moment(at("2021-06-02T03:04:05Z")), "2021-06-01 20:04:05");
    process.env.TZ = "Asia/Tokyo";
    assert.equal(moment(at("2021-06-02T22:04:05Z")), "2021-06-03 07:04:05");
  } finally {
    if (before === undefined) delete process.env.TZ;
    else process.env.TZ = before;
  }
});

test("today needs no date", () => {
  assert.match(moment(Date.now() / 1e3), /^\d\d:\d\d:\d\d$/);
});

test("bytes", () => {
  assert.deepEqual([0, 1023, 1024, 10240, 3 * 2 ** 40].map(bytes), ["0 B", "1023 B", "1.0 KiB", "10 KiB", "3.0 TiB"]);
});

test("metrics, and values that are not finite", () => {
  assert.deepEqual([0.5, 12.345, 1234.56, 1e-5, 0, null].map(metric), [
    "0.5000",
    "12.35",
    "1234.6",
    "1.00e-5",
    "0.0000",
    "not finite",
  ]);
});

test("rates and times", () => {
  assert.deepEqual([0, 9.96, 1234.5].map(rate), ["0.0", "10.0", "1,235"]);
  assert.deepEqual([2e-6, 0.012, 3, 42].map(seconds), ["2 µs", "12.0 ms", "3.0 s", "42 s"]);
  assert.deepEqual([-1, 59.6, 3_599, 7_200, 200_000].map(duration), ["0 s", "1 min 0 s", "59 min 59 s", "2 h 0 min", "2 d 7 h"]);
});

test("one is one", () => {
  assert.deepEqual([0, 1, 2_000].map((it) => plural(it, "line")), ["0 lines", "1 line", "2,000 lines"]);
});

test("the last epoch counts as done when all of its samples are", () => {
  const account = { samples: 10, epochs: 3, epoch: 2 };
  assert.equal(epochsDone({ ...account, total: { done: 29 } }), 2);
  assert.equal(epochsDone({ ...account, total: { done: 30 } }), 3);
});
