// The application: chooses the page by its path, and adds the header and the state of the connection.

import { html, render, useState } from "./html.js";
import { JobPage } from "./job.js";
import { leave, Login, useSession } from "./login.js";
import { Overview } from "./overview.js";

function nameIn(path) {
  const found = /^\/jobs\/([^/]+)$/.exec(path);
  try {
    return found && decodeURIComponent(found[1]);
  } catch {
    return null; // the path is not a valid encoding
  }
}

function App({ path }) {
  const [link, setLink] = useState({ live: null });
  const { session, error, enter } = useSession();
  const out = session === null || link.code === "UNAUTHENTICATED";
  return html`
    <header class="top">
      <a class="brand" href="/"><img src="/static/icon.svg" alt="" width="28" height="28" /><span>Shoal</span></a>
      <${Link} link=${out ? { live: null } : link} />
      ${session?.name && !out && html`<p class="caller"><bdi>${session.name}</bdi> (${session.role})
        <button type="button" onClick=${leave}>Log out</button></p>`}
    </header>
    <main id="main" tabindex="-1">
      ${session?.insecure && html`<p class="banner" role="status"><strong>This cluster asks for no tokens</strong>
        (<code>--insecure</code>): everybody who reaches it can read and change everything in it.</p>`}
      ${out
        ? html`<${Login} error=${error ?? (link.refused && { code: link.code, message: link.reason })} enter=${enter} />`
        : session && html`<${Banner} link=${link} /><${Page} path=${path} acts=${session.acts} tell=${setLink} />`}
    </main>
  `;
}

function Page({ path, acts, tell }) {
  if (path === "/") return html`<${Overview} tell=${tell} />`;
  const name = nameIn(path);
  return name ? html`<${JobPage} name=${name} acts=${acts} tell=${tell} />` : html`<${NotFound} path=${path} />`;
}

function Banner({ link }) {
  if (link.live !== false) return "";
  if (link.refused) {
    return html`<p class="banner" role="alert">
      <strong>The coordinator refuses to update this page:</strong> ${link.reason}.
      ${" "}${link.final ? "Reload the page when the cause is fixed." : "Trying again …"}
    </p>`;
  }
  return html`<p class="banner" role="alert">
    <strong>The coordinator is away:</strong> ${link.reason}. The page shows its last state. Training continues in the
    meantime. Reconnecting …
  </p>`;
}

function Link({ link }) {
  const away = link.refused ? "Not updated" : "Coordinator away";
  const [kind, text] = link.live === null ? ["idle", ""] : link.live ? ["live", "Live"] : ["away", away];
  return html`<p class=${`link ${kind}`} role="status">${text}</p>`;
}

function NotFound({ path }) {
  document.title = "Not found · Shoal";
  return html`<section class="lost">
    <h1>Page not found</h1>
    <p>There is no page at <code>${path}</code>.</p>
    <p><a href="/">Go to the cluster and its jobs</a></p>
  </section>`;
}

render(html`<${App} path=${location.pathname} />`, document.getElementById("app"));
