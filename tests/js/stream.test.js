// A stream that comes back by itself: what it says of the way there, and when it gives up.

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import "./fake_storage.js";
import { follow } from "../../server/shoal_coordinator/page/static/stream.js";

const refused = (status, code, message) => new Response(JSON.stringify({ code, message }), { status });
const stream = (...pieces) =>
  new Response(new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(new TextEncoder().encode(piece));
      controller.close();
    },
  }));

// Follows with answers to one request after another, until `enough` of what it says: that, and the requests.
function followed(answers, enough, on = {}) {
  const links = [];
  const requests = [];
  const errors = [];
  mock.method(console, "error", (error) => errors.push(error));
  mock.method(globalThis, "fetch", async (path, options) => {
    requests.push(options.headers["Last-Event-ID"]);
    const answer = answers[Math.min(requests.length, answers.length) - 1];
    if (answer instanceof Error) throw answer;
    return answer.clone();
  });
  return new Promise((resolve) => {
    const stop = follow("/x", on, (link) => {
      links.push(link);
      if (!enough(links)) return;
      stop();
      mock.restoreAll();
      resolve({ links, requests, errors });
    });
  });
}

test("events come whole, however the pieces are cut, and it goes on behind the last one", async () => {
  const seen = [];
  const on = { a: (data) => seen.push(data) };
  const first = stream('event: a\nid: 1-', '7\ndata: {"x"', ':1}\n\n: ping\n\nevent: b\ndata: 1\n\n');
  const { links, requests } = await followed([first, stream("event: end\ndata: {}\n\n")], (it) => it.at(-1).live === null, on);
  assert.deepEqual(seen, [{ x: 1 }]);
  assert.deepEqual(requests, [undefined, "1-7"]);
  assert.deepEqual(links, [
    { live: true },
    { live: false, reason: "the connection was closed" },
    { live: true },
    { live: null },
  ]);
});

test("nobody answers: the coordinator is away, and is looked for", async () => {
  const { links, errors } = await followed([new TypeError("fetch failed")], (it) => it.length === 2);
  assert.deepEqual(links, Array(2).fill({ live: false, reason: "the coordinator does not respond" }));
  assert.deepEqual(errors, []);
});

test("too many watch: that is said, not that it is away, and it asks again", async () => {
  const answers = [refused(503, "OVERLOADED", "too many"), stream("event: end\ndata: {}\n\n")];
  const { links } = await followed(answers, (it) => it.at(-1).live === null);
  assert.deepEqual(links[0], { live: false, reason: "too many", code: "OVERLOADED", refused: true, final: false });
  assert.deepEqual(links[1], { live: true });
});

test("what will be refused permanently is not asked again", async () => {
  mock.method(globalThis, "fetch", async () => refused(403, "FORBIDDEN", "wrong host"));
  const timers = mock.method(globalThis, "setTimeout");
  let stop;
  const link = await new Promise((resolve) => (stop = follow("/x", {}, resolve)));
  await new Promise((resolve) => setImmediate(resolve));
  stop();
  assert.deepEqual(link, { live: false, reason: "wrong host", code: "FORBIDDEN", refused: true, final: true });
  assert.equal(timers.mock.callCount(), 1, "the one that looks for silence: no pause has begun");
  mock.restoreAll();
});

test("a login that has ended during the stream is said for good", async () => {
  const failure = 'event: failure\ndata: {"code": "UNAUTHENTICATED", "message": "revoked"}\n\n';
  const { links } = await followed([stream(failure)], (it) => it.length === 2);
  assert.deepEqual(links[1], { live: false, reason: "revoked", code: "UNAUTHENTICATED", refused: true, final: true });
});

test("a coordinator that stops is away, as is one behind a proxy", async () => {
  const failure = 'event: failure\ndata: {"code": "UNREACHABLE", "message": "it stops"}\n\n';
  const proxy = new Response("<html>", { status: 502 });
  const { links } = await followed([stream(failure), proxy], (it) => it.length === 3);
  assert.deepEqual(links, [
    { live: true },
    { live: false, reason: "it stops" },
    { live: false, reason: "the coordinator answered 502" },
  ]);
});

test("no such job, at first or meanwhile", async () => {
  const dropped = 'event: failure\ndata: {"code": "UNKNOWN_JOB", "message": "no job"}\n\n';
  for (const answer of [refused(404, "UNKNOWN_JOB", "no job"), stream(dropped)]) {
    const told = [];
    const on = { refused: (error) => told.push(error.message) };
    await followed([answer], (it) => it.at(-1).live === null, on);
    assert.deepEqual(told, ["no job"]);
  }
});

test("a page that cannot show what it is told does not say that the coordinator is away", async () => {
  const on = { a: () => { throw new TypeError("our own mistake"); } };
  const answer = stream("event: a\ndata: 1\n\nevent: end\ndata: {}\n\n");
  const { links, errors } = await followed([answer], (it) => it.at(-1).live === null, on);
  assert.deepEqual(links, [{ live: true }, { live: null }]);
  assert.deepEqual(errors.map(String), ["TypeError: our own mistake"]);
});
