// The history of one job, collected from its events. All its parts are bounded.

import { plural } from "./format.js";

const MAX_POINTS = 4_000; // of one metric of one worker
const MAX_METRICS = 12;
const MAX_WORKERS = 64;
const MAX_LINES = 2_000;
const MAX_HAPPENINGS = 500;
const PACE_S = 10;
const STALLED_S = 10;

export class JobHistory {
  constructor() {
    this.clear();
    this.version = 0; // incremented by every change
  }

  clear() {
    this.metrics = new Map(); // name -> worker -> Points
    this.evaluations = new Map(); // name -> Points
    this.lines = [];
    this.happenings = []; // checkpoints and states
    this.pace = []; // [time, samples] of the last reports
    this.reportedAt = null; // the time of the last report, by the coordinator's clock
  }

  add(events) {
    for (const event of events) this[`_${event.event}`]?.(event);
    this.version += 1;
  }

  // Returns the samples per second over the last reports, or null if there are too few. Returns 0 if the next report is
  // long overdue. `now` is by the coordinator's clock.
  samplesPerS(now) {
    const [first, last] = [this.pace[0], this.pace.at(-1)];
    if (this.pace.length < 2 || last[0] <= first[0]) return null;
    return this.stalled(now) ? 0 : Math.max(0, last[1] - first[1]) / (last[0] - first[0]);
  }

  // Returns the seconds since the last report, or null if there was none.
  silence(now) {
    return this.reportedAt === null ? null : Math.max(0, now - this.reportedAt);
  }

  // Returns whether several reports are missing, judged by their usual interval.
  stalled(now) {
    const silence = this.silence(now);
    if (silence === null) return false;
    const usual = this.pace.length > 1 ? (this.pace.at(-1)[0] - this.pace[0][0]) / (this.pace.length - 1) : 0;
    return silence > Math.max(STALLED_S, 3 * usual);
  }

  _metrics({ worker, step, values, progress, time }) {
    for (const [name, value] of Object.entries(values)) {
      const byWorker = entry(this.metrics, name, MAX_METRICS, () => new Map());
      if (byWorker) entry(byWorker, worker, MAX_WORKERS, () => new Points())?.add(step, value);
    }
    this.reportedAt = time;
    this.pace.push([time, progress.samples]);
    while (this.pace.length > 2 && time - this.pace[0][0] > PACE_S) this.pace.shift();
  }

  _evaluation({ result }) {
    for (const [name, value] of Object.entries(result.values)) {
      entry(this.evaluations, name, MAX_METRICS, () => new Points())?.add(result.step, value);
    }
  }

  _log({ sequence, worker, text, time }) {
    push(this.lines, { sequence, worker, text, time }, MAX_LINES);
  }

  _checkpoint(event) {
    push(this.happenings, event, MAX_HAPPENINGS);
  }
}

// A curve: steps and values, in order of the steps.
export class Points {
  constructor() {
    this.steps = [];
    this.values = [];
  }

  add(step, value) {
    // A job that restarted from a checkpoint repeats steps, so later points no longer count.
    while (this.steps.length && this.steps.at(-1) >= step) {
      this.steps.pop();
      this.values.pop();
    }
    this.steps.push(step);
    this.values.push(value);
    if (this.steps.length > MAX_POINTS) {
      const last = this.steps.length - 1;
      const kept = (_, index) => (last - index) % 2 === 0; // keeps the newest
      this.steps = this.steps.filter(kept);
      this.values = this.values.filter(kept);
    }
  }
}

// Returns the number of log lines after the held ones as text, or 0 if there are none.
export function newer(held, lines, worker) {
  const last = held.at(-1)?.sequence ?? 0;
  const found = lines.filter((it) => it.sequence > last && (!worker || it.worker === worker)).length;
  const dropped = held.length > 0 && lines.length > 0 && lines[0].sequence > last;
  return found && `${dropped ? "over " : ""}${plural(found, "new line")}`;
}

// Returns the mean of several curves, in at most `most` spans of steps.
export function mean(curves, most = 400) {
  const ends = curves.filter((it) => it.steps.length).map((it) => [it.steps[0], it.steps.at(-1)]);
  if (!ends.length) return [[], []];
  const first = Math.min(...ends.map((it) => it[0]));
  const last = Math.max(...ends.map((it) => it[1]));
  const longest = Math.max(...curves.map((it) => it.steps.length));
  const span = Math.max(1, (last - first + 1) / Math.min(most, longest));
  const sums = new Map();
  for (const { steps, values } of curves) {
    steps.forEach((step, index) => {
      if (values[index] === null) return;
      const bin = Math.floor((step - first) / span);
      const sum = sums.get(bin) ?? { step: 0, value: 0, count: 0 };
      sum.step += step;
      sum.value += values[index];
      sum.count += 1;
      sums.set(bin, sum);
    });
  }
  const bins = [...sums.keys()].sort((a, b) => a - b).map((bin) => sums.get(bin));
  return [bins.map((it) => it.step / it.count), bins.map((it) => it.value / it.count)];
}

// Returns exponentially smoothed values. `weight` is the share of the previous value. Values that are not finite are
// left out.
export function smoothed(values, weight) {
  let last = null;
  return values.map((value) => {
    if (value === null) return null;
    last = last === null ? value : weight * last + (1 - weight) * value;
    return last;
  });
}

function entry(map, key, most, make) {
  if (!map.has(key) && map.size < most) map.set(key, make());
  return map.get(key);
}

function push(list, item, most) {
  list.push(item);
  if (list.length > most) list.splice(0, list.length - most);
}
