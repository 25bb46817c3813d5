// Requests to the coordinator: reads, the two actions of the page, and the login.

import { useEffect, useState } from "./html.js";

const PATIENCE_MS = 15_000;

// The key of the login. Beside its cookie, which browsers send to every port of this host, each request needs this key,
// which no other port can read.
const KEY = "shoal-key";

export function keepKey(key) {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

// The headers of a request, with the key if there is one.
export function withKey(headers) {
  const key = localStorage.getItem(KEY);
  return key ? { ...headers, "X-Shoal-Key": key } : headers;
}

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function jobPath(name, what = "") {
  return `/api/jobs/${encodeURIComponent(name)}${what && `/${what}`}`;
}

export async function get(path) {
  return answered(await fetch(path, { headers: withKey({}), cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) }));
}

// Performs an action on a job: cancels it, or takes a checkpoint.
export const act = (path) => post(path, {});

export async function post(path, body) {
  const headers = withKey({ "Content-Type": "application/json", "X-Shoal-Page": "1" });
  const signal = AbortSignal.timeout(PATIENCE_MS);
  return answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

export async function refusal(response) {
  try {
    const { code, message } = await response.json();
    return new Refused(response.status, code, message);
  } catch {
    return new Refused(response.status, "", `the coordinator answered ${response.status}`);
  }
}

async function answered(response) {
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// A hook that reads a path every `everySeconds` seconds while `live`, and again whenever `mark` changes.
export function usePolled(path, everySeconds, live, mark = "") {
  const [answer, setAnswer] = useState({ value: null, error: null });
  useEffect(() => {
    let timer = 0;
    let over = false;
    const ask = async () => {
      try {
        const value = await get(path);
        if (!over) setAnswer({ value, error: null });
      } catch (error) {
        if (!over) setAnswer((before) => ({ value: before.value, error }));
      }
      if (!over && live) timer = setTimeout(ask, everySeconds * 1e3);
    };
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [path, everySeconds, live, mark]);
  return answer;
}
