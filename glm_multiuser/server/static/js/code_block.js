/** A block of code: its language, a button that copies it, and the code itself. */

import { copyTextButton } from "./copy_button.js";
import { element } from "./dom.js";

/** `pre` in a frame; wide code scrolls by itself, also for those who have only a keyboard. */
export function codeBlock(pre) {
  const code = pre.firstElementChild ?? pre;
  const language = /(?:^|\s)language-(\S+)/.exec(code.className)?.[1] ?? "";
  const frame = element("div", { class: "scroll", tabindex: 0 });
  const copy = copyTextButton("copyCode", () => code.textContent.replace(/\n$/, ""));
  const bar = element("div", { class: "code-bar" }, element("span", {}, language), copy);
  // Code is written from left to right, also in an answer that is not.
  pre.replaceWith(element("div", { class: "code", dir: "ltr" }, bar, frame));
  frame.append(pre);
}
