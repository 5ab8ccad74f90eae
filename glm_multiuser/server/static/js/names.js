/** Display names of conversations: the title, or the number in the page's language. */

import { describe, phrase, say, unsay } from "./i18n.js";

/** The name inside a sentence, where a question as title would be hard to read. */
export function nameOf({ name, number }) {
  return name || phrase("unnamed", { number });
}

/** Shows the title in `node` and returns the node. */
export function sayTitle(node, { title, number }) {
  node.dir = "auto";
  if (title === "") return say(node, "unnamed", { number });
  unsay(node);
  node.textContent = title;
  return node;
}

/** Labels `node` with number and title, because titles are not unique. */
export function labelWithTitle(node, { title, number }) {
  return describe(node, "label", title ? "titled" : "unnamed", { number, title });
}
