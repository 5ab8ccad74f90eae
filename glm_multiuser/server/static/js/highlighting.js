/** Syntax highlighting for blocks that name their language. */

import highlighter from "../vendor/highlightjs/highlight.min.js";

// A growing block is highlighted again at every redraw.
const LONGEST = 20_000;

/** Returns escaped HTML with the tokens in spans; null for code that stays plain. */
export function highlighted(code, language) {
  if (!language || code.length > LONGEST || !highlighter.getLanguage(language)) return null;
  return highlighter.highlight(code, { language, ignoreIllegals: true }).value;
}
