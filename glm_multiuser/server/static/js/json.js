/** JSON in an answer: a line for each value. */

// JavaScript would round it.
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

/** A block of Markdown: JSON with a line for each value, and text as it is where it is none. */
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
