/** What a conversation is called: what the user named it, or its number in the page's language. */

import { phrase, say, unsay } from "./i18n.js";

export function nameOf({ name, number }) {
  return name || phrase("unnamed", { number });
}

/** Shows the name in `node`, and returns the node. */
export function sayName(node, { name, number }) {
  if (name === "") return say(node, "unnamed", { number });
  unsay(node);
  node.textContent = name;
  return node;
}
