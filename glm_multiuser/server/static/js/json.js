/** Pretty-prints JSON answers: one line per value. */

const PARTS = /"(?:[^"\\]|\\.)*"|\s+|\{\s*\}|\[\s*\]|[{}[\],:]/g;

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
    JSON.parse(text);
    language = "json";
    text = indented(text);
  } catch {
    // A model may write anything.
  }
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Keeps numbers and names as written: JavaScript's objects round, reorder and merge them. */
function indented(json) {
  let depth = 0;
  const line = (step = 0) => `\n${"  ".repeat((depth += step))}`;
  return json.replace(PARTS, (part) => {
    if (part.startsWith('"')) return JSON.stringify(JSON.parse(part));
    if (part === "{" || part === "[") return part + line(1);
    if (part === "}" || part === "]") return line(-1) + part;
    if (part === ",") return part + line();
    if (part === ":") return ": ";
    return part.replace(/\s+/, "");
  });
}
