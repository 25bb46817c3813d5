// Small things that both pages show: states, tiles, bars, members, and a voice for screen readers.

import { clock, duration } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";

// A state is a shape, a word and a colour.
const SHAPES = {
  alive: ["●", "good"],
  late: ["◐", "warn"],
  leaving: ["◑", "warn"],
  left: ["○", "soft"],
  dead: ["✕", "bad"],
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

// A member's state in the words of `shoal status`, and since when.
export function MemberState({ member, now }) {
  return html`<${State} state=${member.state} text=${stateText(member, now)} />`;
}

export function stateText({ state, silent_s: silent }, now) {
  const more = {
    late: `, silent for ${duration(Math.max(1, silent))}`,
    left: ` at ${clock(now - silent)}`,
    dead: `, silent since ${clock(now - silent)}`,
  };
  return state + (more[state] ?? "");
}

// What is under way, from what there is by state.
export const alive = (states = {}) => (states.alive ?? 0) + (states.late ?? 0) + (states.leaving ?? 0);

export function Tile({ label, value, note = "" }) {
  return html`<div class="tile"><dt>${label}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`;
}

// A table that is there for whoever wants the numbers behind a picture.
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

// A table that a narrow screen scrolls, by keys too.
export function Table({ label, columns, rows, empty }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map(([name, kind]) => html`<th scope="col" class=${kind ?? ""}>${name}</th>`)}</tr></thead>
      <tbody>${rows}</tbody>
    </table>
  </div>`;
}

// Says to screen readers what has become different: a map of things to their states. Not what is there at first.
export function Voice({ states, say }) {
  const before = useRef(null);
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (before.current) {
      const news = Object.entries(states).filter(([thing, state]) => before.current[thing] !== state);
      if (news.length) setSaid(news.slice(0, 5).map(([thing, state]) => say(thing, state)).join(". "));
    }
    if (Object.keys(states).length) before.current = states;
  });
  return html`<p class="unseen" role="status">${said}</p>`;
}
