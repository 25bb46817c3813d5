// The actions on a job: taking a checkpoint, and cancelling it after a confirmation.

import { act, jobPath } from "./api.js";
import { html, useRef, useState } from "./html.js";

export function Actions({ name, live }) {
  const dialog = useRef(null);
  const [busy, setBusy] = useState(false);
  const [message, setMessage] = useState({ text: "", bad: false });
  const perform = async (what, done) => {
    setBusy(true);
    setMessage({ text: "", bad: false });
    try {
      setMessage({ text: done(await act(jobPath(name, what))), bad: false });
    } catch (error) {
      setMessage({ text: error.code ? error.message : "The coordinator does not respond.", bad: true });
    }
    setBusy(false);
  };
  const checkpoint = () => perform("checkpoint", ({ attempt }) => `Checkpoint attempt ${attempt} has started.`);
  const cancel = () => {
    dialog.current.close();
    perform("cancel", () => "The job was cancelled.");
  };
  return html`<div class="actions">
    ${live &&
    html`<button type="button" disabled=${busy} onClick=${checkpoint}>Take a checkpoint</button>
      <button type="button" class="danger" disabled=${busy}
          onClick=${() => dialog.current.showModal()}>Cancel the job …</button>`}
    <p class=${message.bad ? "bad" : "soft"} role=${message.bad ? "alert" : "status"}>${message.text}</p>
    <dialog ref=${dialog} aria-labelledby="ask">
      <h2 id="ask">Cancel <bdi>${name}</bdi>?</h2>
      <p>Its workers stop after their current batch. Afterwards it can continue only from a checkpoint.</p>
      <div class="choice">
        <button type="button" autofocus onClick=${() => dialog.current.close()}>Let it run</button>
        <button type="button" class="danger" onClick=${cancel}>Cancel the job</button>
      </div>
    </dialog>
  </div>`;
}
