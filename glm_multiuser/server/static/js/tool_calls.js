/** Calls of tools: how they arrive, and how they are written down. */

/**
 * Adds the parts of calls that one event of a stream brings. A call may come whole or in pieces.
 * @param calls `{name, arguments}` of each call so far.
 * @param parts as in OpenAI's chunks.
 */
export function addParts(calls, parts) {
  for (const { index = 0, function: { name = "", arguments: written = "" } = {} } of parts) {
    calls[index] ??= { name: "", arguments: "" };
    calls[index].name += name ?? "";
    calls[index].arguments += written ?? "";
  }
}

/** A call in one line. */
export function written(call) {
  return `${call.name}(${call.arguments})`;
}

// JavaScript would round it.
const LONG_NUMBER = /\d{16}/;

/** The arguments as Markdown: JSON with a line for each value, and as they are where it is none. */
export function argumentsAsMarkdown(call) {
  let text = call.arguments;
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
