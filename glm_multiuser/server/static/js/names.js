/** What a conversation is called: by its title, or its number in the page's language. */

import { describe, phrase, say, unsay } from "./i18n.js";

/** What a sentence calls it: a question in the middle of a sentence would be hard to read. */
export function nameOf({ name, number }) {
  return name || phrase("unnamed", { number });
}

/** Shows the title in `node`, and returns the node. */
export function sayTitle(node, { title, number }) {
  node.dir = "auto";
  if (title === "") return say(node, "unnamed", { number });
  unsay(node);
  node.textContent = title;
  return node;
}

/** Labels `node` with number and title: two conversations may begin with the same question. */
export function labelWithTitle(node, { title, number }) {
  return describe(node, "label", title ? "titled" : "unnamed", { number, title });
}
