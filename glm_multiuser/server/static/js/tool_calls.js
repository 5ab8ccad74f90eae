/** Tool calls: assembling and formatting. */

/**
 * Merges the tool call deltas of one stream event. A call may arrive whole or in parts.
 * @param calls `{name, arguments}` of each call so far.
 * @param parts deltas as in OpenAI's chunks.
 */
export function addParts(calls, parts) {
  for (const { index = 0, function: { name = "", arguments: written = "" } = {} } of parts) {
    calls[index] ??= { name: "", arguments: "" };
    calls[index].name += name ?? "";
    calls[index].arguments += written ?? "";
  }
}

/** Formats a call in one line. */
export function written(call) {
  return `${call.name}(${call.arguments})`;
}
