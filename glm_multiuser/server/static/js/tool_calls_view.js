/** Calls of tools in an answer. The page runs no tools: it shows what was called, and with what. */

import { element, icon } from "./dom.js";
import { say } from "./i18n.js";
import { jsonAsMarkdown } from "./json.js";
import { showMarkdown } from "./markdown.js";

/** One block for each call; its heading folds and unfolds it. */
export function toolCallsView(calls) {
  return calls.map((call) => {
    const heading = element("summary", { class: "call-name" }, icon("tool"));
    heading.append(say(element("span"), "toolCall"), element("code", {}, call.name));
    return folding(heading, call.arguments);
  });
}

/** An answer that is nothing but JSON. */
export function jsonView(text) {
  return folding(say(element("summary", { class: "call-name" }), "jsonAnswer"), text);
}

function folding(heading, text) {
  const body = element("div", { class: "markdown" });
  showMarkdown(body, jsonAsMarkdown(text));
  return element("details", { class: "call", open: true }, heading, body);
}
