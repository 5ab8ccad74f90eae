/** Confirmation before data is lost. */

import { say } from "./i18n.js";

/**
 * Resolves to whether the user agrees.
 * @param question text key of the question.
 * @param action text key of the confirm button.
 */
export function confirmed(question, action, values) {
  const dialog = document.querySelector("#confirm");
  say(dialog.querySelector("h2"), question, values);
  say(dialog.querySelector("[value=yes]"), action);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
