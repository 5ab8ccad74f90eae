/** Tool calls in an answer. The page does not run tools; it shows names and arguments. */

import { element, icon } from "./dom.js";
import { say } from "./i18n.js";
import { jsonAsMarkdown } from "./json.js";
import { showMarkdown } from "./markdown.js";

/** One collapsible block per call. */
export function toolCallsView(calls) {
  return calls.map((call) => {
    const heading = element("summary", { class: "call-name" }, icon("tool"));
    heading.append(say(element("span"), "toolCall"), element("code", {}, call.name));
    return folding(heading, call.arguments);
  });
}

/** An answer that is entirely JSON. */
export function jsonView(text) {
  return folding(say(element("summary", { class: "call-name" }), "jsonAnswer"), text);
}

function folding(heading, text) {
  const body = element("div", { class: "markdown" });
  showMarkdown(body, jsonAsMarkdown(text));
  return element("details", { class: "call", open: true }, heading, body);
}
