// The key of a login: every request sends it, until the user logs out.

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import "./fake_storage.js";
import { act, get, keepKey } from "../../server/shoal_coordinator/page/static/api.js";
import { leave } from "../../server/shoal_coordinator/page/static/login.js";
import { follow } from "../../server/shoal_coordinator/page/static/stream.js";

test("reads, actions, streams and the logout send the key, and nothing sends it after the logout", async () => {
  const sent = [];
  let stop;
  globalThis.location = { assign: () => {} };
  mock.method(globalThis, "fetch", async (path, { headers }) => {
    sent.push([path, headers["X-Shoal-Key"]]);
    return new Response("{}");
  });
  try {
    await get("/first");
    keepKey("secret");
    await get("/read");
    await act("/action");
    await new Promise((resolve) => (stop = follow("/stream", {}, resolve)));
    stop();
    await leave();
    await get("/last");
  } finally {
    mock.restoreAll();
    delete globalThis.location;
  }
  assert.deepEqual(sent, [
    ["/first", undefined],
    ["/read", "secret"],
    ["/action", "secret"],
    ["/stream", "secret"],
    ["/api/logout", "secret"],
    ["/last", undefined],
  ]);
});
