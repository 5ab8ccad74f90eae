/** Pretty-prints JSON answers: one line per value. */

// Numbers that JavaScript would round.
const LONG_NUMBER = /\d{16}/;

/** Whether a whole answer is a JSON object or list. */
export function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Returns a Markdown block with indented JSON; text that is not JSON stays as it is. */
export function jsonAsMarkdown(text) {
  let language = "";
  try {
    const value = JSON.parse(text);
    language = "json";
    if (!LONG_NUMBER.test(text)) text = JSON.stringify(value, null, 2);
  } catch {
    // A model may write anything.
  }
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}${language}\n${text}\n${fence}`;
}
