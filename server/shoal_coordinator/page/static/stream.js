// A stream of server-sent events that reconnects, continues where it was, and reports the state of the connection.
//
// It uses fetch, because EventSource reports neither why a request was refused nor that a connection is silent.

import { Refused, refusal, withKey } from "./api.js";

// The coordinator sends an event or a comment at least every 5 seconds.
const SILENCE_MS = 12_000;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 4_000;

// Calls `on[kind](data)` for each event, and `tell` with the state of the connection:
//   {live: true}                                  it is open
//   {live: false, reason}                         the coordinator is away; the stream reconnects
//   {live: false, reason, code, refused, final}   the coordinator refuses the request; if final, for good
//   {live: null}                                  it has ended
// Returns a function that ends the stream. An event `end` or an unknown job also ends it; `on.refused` gets the latter.
export function follow(path, on, tell) {
  const stopped = new AbortController();
  run(path, on, tell, stopped.signal);
  return () => stopped.abort();
}

async function run(path, on, tell, stopped) {
  let mark = "";
  let pause = FIRST_PAUSE_MS;
  while (!stopped.aborted) {
    const found = await once(path, mark, stopped, on, () => {
      pause = FIRST_PAUSE_MS;
      tell({ live: true });
    });
    if (stopped.aborted) return;
    mark = found.mark;
    if (found.refused && isUnknown(found.refused)) {
      on.refused?.(found.refused);
      found.over = true;
    }
    if (found.over) {
      tell({ live: null });
      return;
    }
    const link = linkOf(found);
    tell(link);
    if (link.final) return;
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

const isUnknown = ({ status, code }) => status === 404 || code === "UNKNOWN_JOB";

// Returns the state of the connection after an unexpected end. A reply without a code comes from a proxy.
function linkOf({ reason, refused }) {
  if (!refused) return { live: false, reason };
  const { status, code, message } = refused;
  if (!code || code === "UNREACHABLE") return { live: false, reason: message };
  const final = (status >= 400 && status < 500) || code === "UNAUTHENTICATED";
  return { live: false, reason: message, code, refused: true, final };
}

// Reads one connection. Returns the last mark, and whether the stream has ended, was refused or was interrupted.
async function once(path, mark, stopped, on, opened) {
  const silent = new AbortController();
  const signal = AbortSignal.any([stopped, silent.signal]);
  let timer = setTimeout(() => silent.abort(), SILENCE_MS);
  const found = { mark, over: false, refused: null, reason: "the connection was closed" };
  try {
    const headers = withKey(mark ? { "Last-Event-ID": mark } : {});
    const response = await fetch(path, { headers, cache: "no-store", signal });
    if (!response.ok) throw await refusal(response);
    opened();
    const lines = new Lines();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    while (!found.over) {
      const { done, value } = await reader.read();
      if (done) break;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENCE_MS);
      for (const event of lines.take(value)) {
        if (event.kind === "failure") found.refused = new Refused(0, event.data.code, event.data.message);
        else handle(on, event);
        found.mark = event.id || found.mark;
        found.over ||= event.kind === "end";
      }
    }
  } catch (error) {
    if (error instanceof Refused) found.refused = error;
    else if (!isOfTheWay(error)) console.error(error);
    found.reason = silent.signal.aborted ? "the coordinator is silent" : "the coordinator does not respond";
  } finally {
    clearTimeout(timer);
    silent.abort();
  }
  return found;
}

// Calls a handler. Its errors are defects of the page and say nothing about the coordinator.
function handle(on, event) {
  try {
    on[event.kind]?.(event.data);
  } catch (error) {
    console.error(error);
  }
}

// Returns whether `fetch` or its stream has failed because of the connection.
const isOfTheWay = (error) => error instanceof TypeError || error instanceof DOMException;

// A parser that turns pieces of text into events.
class Lines {
  #rest = "";
  #event = { kind: "message", id: "", text: [] };

  *take(piece) {
    const lines = (this.#rest + piece).split(/\r?\n/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line !== "") {
        this.#field(line);
        continue;
      }
      const { kind, id, text } = this.#event;
      this.#event = { kind: "message", id: "", text: [] };
      if (text.length) yield { kind, id, data: JSON.parse(text.join("\n")) };
    }
  }

  #field(line) {
    const colon = line.indexOf(":");
    const value = line.slice(colon + 1).replace(/^ /, "");
    switch (line.slice(0, colon)) {
      case "event":
        this.#event.kind = value;
        break;
      case "id":
        this.#event.id = value;
        break;
      case "data":
        this.#event.text.push(value);
        break;
    }
  }
}
