// The log of a job's programs, of all workers or one, which follows the newest line or is paused.

import { clock } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { newer } from "./job_history.js";
import { Card } from "./parts.js";

const SHOWN = 500;

export function Log({ history }) {
  const [worker, setWorker] = useState("");
  const [held, setHeld] = useState(null); // the lines at the time of the pause; null while the log follows
  const place = useRef(null);
  const lines = held ?? history.lines;
  const workers = [...new Set([...lines, ...history.lines].map((it) => it.worker))].sort();
  const all = lines.filter((it) => !worker || it.worker === worker);
  const shown = all.slice(-SHOWN);
  const last = shown.at(-1)?.sequence;
  const waiting = held && newer(held, history.lines, worker);
  useEffect(() => {
    if (held === null && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [last, held, worker]);
  const hold = () => setHeld(held === null ? [...history.lines] : null);
  // Scrolling up pauses the log.
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = place.current;
    if (held === null && scrollHeight - scrollTop - clientHeight > 60) hold();
  };
  const tools = html`<div class="tools">
    <label for="whose">Worker</label>
    <select id="whose" value=${worker} onChange=${(event) => setWorker(event.target.value)}>
      <option value="">all</option>
      ${workers.map((it) => html`<option key=${it} value=${it}>${it}</option>`)}
    </select>
    <button type="button" aria-pressed=${held !== null}
        onClick=${hold}>${held === null ? "Pause" : `Follow${waiting ? ` (${waiting})` : ""}`}</button>
  </div>`;
  return html`<${Card} id="log" title="Log" wide tools=${tools}>
    <div class="log" ref=${place} tabindex="0" role="log" aria-live="off" aria-labelledby="log" onScroll=${scrolled}>
      ${shown.length ? "" : html`<p class="empty">No lines yet.</p>`}
      ${shown.map(
        (it) => html`<p key=${it.sequence}><time>${clock(it.time)}</time> <span
            class="who">${it.worker}</span> <bdi>${it.text}</bdi></p>`,
      )}
    </div>
    ${all.length > SHOWN && html`<p class="soft">Showing the last ${SHOWN} lines. shoal logs shows all that are kept.</p>`}
  <//>`;
}
