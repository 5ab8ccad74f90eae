/** The header of a conversation: title, model and buttons. */

import { element, iconButton } from "./dom.js";
import { describe } from "./i18n.js";
import { isComposing } from "./input_method.js";
import { ModelChoice } from "./model_choice.js";
import { sayTitle } from "./names.js";

const LONGEST_NAME = 60;

export class PaneHeader {
  #conversation;
  #name;
  #model;

  /** `onClear` and `onClose` are the handlers of these buttons. */
  constructor(conversation, onClear, onClose) {
    this.#conversation = conversation;
    this.#name = element("h2", { class: "pane-name" });
    this.#model = new ModelChoice(conversation);
    this.node = element(
      "header",
      { class: "pane-header" },
      element("span", { class: "hue", "aria-hidden": "true" }),
      element("div", { class: "pane-title" }, this.#name, this.#model.node),
      iconButton("rename", "rename", () => this.#rename()),
      iconButton("clear", "clear", onClear),
      iconButton("close", "close", onClose),
    );
    this.#name.addEventListener("dblclick", () => this.#rename());
    this.update();
  }

  update() {
    sayTitle(this.#name, this.#conversation);
    this.#name.title = this.#name.textContent;
    this.#model.update();
  }

  #rename() {
    const before = document.activeElement;
    const field = element("input", { class: "new-name", dir: "auto", maxlength: LONGEST_NAME });
    describe(field, "label", "newName");
    field.defaultValue = this.#name.textContent;
    let open = true;
    const end = (name) => {
      // Removing the field blurs it, which would end the edit twice.
      if (!open) return;
      open = false;
      field.remove();
      this.#name.classList.remove("visually-hidden");
      if (name !== null) this.#conversation.rename(name);
      if (document.activeElement === document.body) before?.focus();
    };
    field.addEventListener("blur", () => end(changed(field)));
    field.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter") {
        // The refocused button would treat the key as a press.
        event.preventDefault();
        end(changed(field));
      }
      if (event.key === "Escape") {
        // The pane would stop the answer.
        event.stopPropagation();
        end(null);
      }
    });
    // The heading stays for screen readers: without it a level would be missing.
    this.#name.classList.add("visually-hidden");
    this.#name.after(field);
    field.select();
  }
}

/** The new name, or null; with an empty one, the first question is the title again. */
function changed({ value, defaultValue }) {
  const name = value.trim();
  // Not the title of now: another tab may have changed that.
  return name === defaultValue ? null : name;
}
