/** Code in colours, where a block names its language. */

import highlighter from "../vendor/highlightjs/highlight.min.js";

// A growing block is coloured anew each time that it is drawn.
const LONGEST = 20_000;

/** HTML of the code, escaped, with its tokens in spans; null where it stays plain. */
export function highlighted(code, language) {
  if (!language || code.length > LONGEST || !highlighter.getLanguage(language)) return null;
  return highlighter.highlight(code, { language, ignoreIllegals: true }).value;
}
