/** The name of a conversation and the buttons that concern all of it. */

import { element, iconButton } from "./dom.js";
import { describe } from "./i18n.js";
import { sayName } from "./names.js";

const LONGEST_NAME = 60;

export class PaneHeader {
  #conversation;
  #name;

  /** `onClear` and `onClose` are what these buttons do. */
  constructor(conversation, onClear, onClose) {
    this.#conversation = conversation;
    this.#name = element("h2", { class: "pane-name", id: `name-${conversation.id}` });
    this.node = element(
      "header",
      { class: "pane-header" },
      element("span", { class: "hue", "aria-hidden": "true" }),
      this.#name,
      iconButton("rename", "rename", () => this.#rename()),
      iconButton("clear", "clear", onClear),
      iconButton("close", "close", onClose),
    );
    this.#name.addEventListener("dblclick", () => this.#rename());
    this.update();
  }

  update() {
    sayName(this.#name, this.#conversation);
  }

  #rename() {
    const before = document.activeElement;
    const field = element("input", { class: "new-name", maxlength: LONGEST_NAME });
    describe(field, "label", "newName");
    field.value = this.#name.textContent;
    let open = true;
    const end = (name) => {
      // Taking the field away blurs it, which would end it a second time.
      if (!open) return;
      open = false;
      field.replaceWith(this.#name);
      if (name !== null) this.#conversation.rename(name);
      if (document.activeElement === document.body) before?.focus();
    };
    field.addEventListener("blur", () => end(this.#changed(field.value)));
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") {
        // The button that gets the focus back would take it for a press.
        event.preventDefault();
        end(this.#changed(field.value));
      }
      if (event.key === "Escape") {
        // The pane would take it for the wish to stop the answer.
        event.stopPropagation();
        end(null);
      }
    });
    this.#name.replaceWith(field);
    field.select();
  }

  /** The new name; an empty one gives the conversation its number back. */
  #changed(typed) {
    const name = typed.trim();
    return name === this.#name.textContent ? null : name;
  }
}
