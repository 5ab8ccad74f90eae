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
