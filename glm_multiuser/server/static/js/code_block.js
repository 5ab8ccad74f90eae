/** A code block with its language, and what else is written behind that, and a copy button. */

import { copyTextButton } from "./copy_button.js";
import { element } from "./dom.js";

/** Wraps `pre` in a frame; wide code scrolls inside it, also by keyboard. */
export function codeBlock(pre) {
  const code = pre.firstElementChild ?? pre;
  const language = code.title;
  code.removeAttribute("title");
  const frame = element("div", { class: "scroll", tabindex: 0 });
  const copy = copyTextButton("copyCode", () => code.textContent.replace(/\n$/, ""));
  const bar = element("div", { class: "code-bar" }, element("span", {}, language), copy);
  // Code runs left to right, also in a right-to-left answer.
  pre.replaceWith(element("div", { class: "code", dir: "ltr" }, bar, frame));
  frame.append(pre);
}
