/** The view of a question; editing it continues the conversation from there. */

import { element, iconButton, textButton } from "./dom.js";
import { describe, say } from "./i18n.js";
import { isComposing } from "./input_method.js";

export class QuestionView {
  #question;
  #onEdit;
  #canEdit = false;
  #open;
  #send = element("button", { type: "submit", class: "button primary" });
  #shown;

  /** `onEdit` receives the new question. */
  constructor(question, onEdit) {
    this.#question = question;
    this.#onEdit = onEdit;
    this.#open = iconButton("rename", "edit", () => this.#edit());
    this.#shown = element(
      "div",
      { class: "asked" },
      this.#open,
      element("p", { class: "question", dir: "auto" }, question),
    );
    this.node = element("div", {}, this.#shown);
  }

  /** An edit stays open during an answer and can be sent afterwards. */
  update({ canEdit }) {
    this.#canEdit = canEdit;
    this.#open.hidden = !canEdit;
    this.#send.disabled = !canEdit;
  }

  #edit() {
    const attributes = { dir: "auto", rows: 1, enterkeyhint: "send", autocomplete: "off" };
    const field = element("textarea", attributes);
    field.value = this.#question;
    const form = element(
      "form",
      { class: "question-editor" },
      element("label", {}, say(element("span", { class: "visually-hidden" }), "question"), field),
      say(element("p", { class: "soft" }), "editReplaces"),
      element(
        "div",
        { class: "dialog-actions" },
        textButton("cancel", () => this.#close()),
        // While it was out of the document, the language may have changed.
        say(this.#send, "send"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(field);
    });
    field.addEventListener("keydown", (event) => this.#onKey(event, field));
    this.node.replaceChildren(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  #onKey(event, field) {
    if (isComposing(event)) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#submit(field);
    }
    if (event.key === "Escape") {
      // The pane would stop the answer.
      event.stopPropagation();
      this.#close();
    }
  }

  #submit(field) {
    const question = field.value.trim();
    if (this.#canEdit && question !== "") this.#onEdit(question);
  }

  #close() {
    describe(this.#open, "hint", "edit");
    this.node.replaceChildren(this.#shown);
    if (this.#canEdit) this.#open.focus();
    else this.node.closest("[role=log]")?.focus();
  }
}
