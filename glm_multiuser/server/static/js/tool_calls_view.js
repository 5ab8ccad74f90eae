/** Calls of tools in an answer. The page runs no tools: it shows what was called, and with what. */

import { element, icon } from "./dom.js";
import { say } from "./i18n.js";
import { showMarkdown } from "./markdown.js";
import { argumentsAsMarkdown } from "./tool_calls.js";

/** One block for each call. */
export function toolCallsView(calls) {
  return calls.map((call) => {
    const heading = element("p", { class: "call-name" }, icon("tool"));
    heading.append(say(element("span"), "toolCall"), element("code", {}, call.name));
    const body = element("div", { class: "markdown" });
    showMarkdown(body, argumentsAsMarkdown(call));
    return element("div", { class: "call" }, heading, body);
  });
}
