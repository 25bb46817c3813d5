// The only module that creates elements, with all text as text. No module sets HTML from a string, and the page's policy
// (Trusted Types) forbids it.

export { html, render, useEffect, useMemo, useRef, useState } from "./vendor/htm/preact.module.js";
