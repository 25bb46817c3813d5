// Components of both pages: states, tiles, bars, members, tables, and a live region for screen readers.

import { clock, duration, plural } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";

// The shape and the colour class of each state.
const SHAPES = {
  alive: ["●", "good"],
  late: ["◐", "warn"],
  draining: ["◑", "warn"],
  left: ["○", "soft"],
  lost: ["✕", "bad"],
  pending: ["○", "soft"],
  starting: ["◔", "soft"],
  placing: ["◔", "soft"],
  running: ["▶", "accent"],
  succeeded: ["✓", "good"],
  failed: ["✕", "bad"],
  cancelled: ["◼", "warn"],
};

export function State({ state, text = state }) {
  const [shape, kind] = SHAPES[state] ?? ["", "soft"];
  return html`<span class=${`state ${kind}`}><span aria-hidden="true">${shape}</span> ${text}</span>`;
}

export const isFinished = (state) => ["succeeded", "failed", "cancelled"].includes(state);

// A member's state as in `shoal status`, with its time.
export function MemberState({ member, now }) {
  return html`<${State} state=${member.state} text=${stateText(member, now)} />`;
}

export function stateText({ state, silent_s: silent, waiting_jobs: jobs = [], drained = false }, now) {
  const more = {
    draining: drained ? ": nothing left" : jobs.length ? `: ${plural(jobs.length, "job")} left` : "",
    late: `, silent for ${duration(Math.max(1, silent))}`,
    left: ` at ${clock(now - silent)}`,
    lost: `, silent since ${clock(now - silent)}`,
  };
  return state + (more[state] ?? "");
}

// The number of live members, from the counts by state.
export const alive = (states = {}) => (states.alive ?? 0) + (states.late ?? 0) + (states.draining ?? 0);

export function Tile({ label, value, note = "" }) {
  return html`<div class="tile"><dt>${label}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`;
}

// A table of the numbers behind a picture, closed at first.
export function Numbers({ title, children }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${title} as a table</summary>
    ${open && children()}
  </details>`;
}

export function Bar({ share, label }) {
  const percent = Math.min(100, Math.max(0, share * 100));
  return html`<span class="bar" role="img" aria-label=${label}><span style=${{ width: `${percent}%` }}></span></span>`;
}

export function Card({ id, title, children, wide = false, tools = null }) {
  return html`<section class=${`card ${wide ? "wide" : ""}`} aria-labelledby=${id}>
    <div class="head"><h2 id=${id}>${title}</h2>${tools}</div>
    ${children}
  </section>`;
}

// A table that scrolls on a narrow screen, with the keyboard too.
export function Table({ label, columns, rows, empty }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map(([name, kind]) => html`<th scope="col" class=${kind ?? ""}>${name}</th>`)}</tr></thead>
      <tbody>${rows}</tbody>
    </table>
  </div>`;
}

// Announces changes of state to screen readers. `states` maps names to states; the first states are not announced.
export function LiveRegion({ states, announce }) {
  const before = useRef(null);
  const [announcement, setAnnouncement] = useState("");
  useEffect(() => {
    if (before.current) {
      const changes = Object.entries(states).filter(([name, state]) => before.current[name] !== state);
      if (changes.length) setAnnouncement(changes.slice(0, 5).map(([name, state]) => announce(name, state)).join(". "));
    }
    if (Object.keys(states).length) before.current = states;
  });
  return html`<p class="unseen" role="status">${announcement}</p>`;
}
