// The login: by the code of a login link, which is in the URL's fragment, or by a token in a form.

import { get, keepKey, post } from "./api.js";
import { html, useEffect, useState } from "./html.js";

const CODE = /^#login=([\w-]+)$/;

// A hook that returns {session, error, enter}: the session's record, or null without a login, or undefined until it is
// known; and a function that logs in by a token.
export function useSession() {
  const [state, setState] = useState({ session: undefined, error: null });
  useEffect(() => {
    begin(location.hash).then(
      (session) => setState({ session, error: null }),
      (error) => setState({ session: null, error }),
    );
  }, []);
  const enter = (token) =>
    logIn({ token }).then(
      () => location.reload(),
      (error) => setState({ session: null, error }),
    );
  return { ...state, enter };
}

async function logIn(proof) {
  const session = await post("/api/login", proof);
  keepKey(session.key);
  return session;
}

async function begin(hash) {
  const code = CODE.exec(hash)?.[1];
  if (code) {
    history.replaceState(null, "", location.pathname); // the code does not stay in the history
    return logIn({ code });
  }
  try {
    return await get("/api/session");
  } catch (error) {
    if (error.status === 401) return null;
    throw error;
  }
}

export async function leave() {
  await post("/api/logout", {});
  keepKey("");
  location.assign("/");
}

export function Login({ error, enter }) {
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const token = new FormData(event.target).get("token").trim();
    setBusy(true);
    await enter(token);
    setBusy(false);
  };
  useEffect(() => {
    document.title = "Log in · Shoal";
  }, []);
  return html`<section class="lost">
    <h1>Log in</h1>
    <p>On the coordinator's machine, <code>shoal page</code> prints a link that logs you in. Elsewhere, give your token.</p>
    <form class="login" onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" autocomplete="off" spellcheck=${false} required />
      <button type="submit" disabled=${busy}>Log in</button>
    </form>
    ${error && html`<p class="bad" role="alert">${error.code ? error.message : "The coordinator does not respond."}</p>`}
  </section>`;
}
