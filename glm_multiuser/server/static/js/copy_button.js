/** A button that copies a text and briefly confirms it. */

import { copy } from "./clipboard.js";
import { element, icon } from "./dom.js";
import { describe, say } from "./i18n.js";
import { notify } from "./notices.js";

const COPIED_FOR = 1500;

/** Copy button with an icon and `hint` as its label. `textOf` returns the text to copy. */
export function copyIconButton(hint, textOf) {
  const show = (button, name, image) => {
    button.replaceChildren(icon(image));
    describe(button, "hint", name);
  };
  const button = element("button", { type: "button", class: "icon-button" });
  return copying(button, textOf, show, hint);
}

/** Copy button with the text `label`. */
export function copyTextButton(label, textOf) {
  const button = element("button", { type: "button", class: "copy-code" });
  return copying(button, textOf, (node, name) => say(node, name), label);
}

function copying(button, textOf, show, name) {
  show(button, name, "copy");
  button.addEventListener("click", async () => {
    if (!(await copy(textOf()))) {
      notify("notCopied");
      return;
    }
    show(button, "copied", "check");
    setTimeout(() => show(button, name, "copy"), COPIED_FOR);
  });
  return button;
}
