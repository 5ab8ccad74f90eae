/** The input field, with a button that sends the question or stops its answer. */

import { element, icon } from "./dom.js";
import { describe, say } from "./i18n.js";
import { isComposing } from "./input_method.js";

export class Composer {
  #conversation;
  #field;
  #button = element("button", { type: "submit", class: "send" });
  #shown = "";

  /** `onSend` receives the question. */
  constructor(conversation, onSend) {
    this.#conversation = conversation;
    const id = `message-${conversation.id}`;
    this.#field = element("textarea", { id, dir: "auto", rows: 1, enterkeyhint: "send", autocomplete: "off" });
    describe(this.#field, "placeholder", "messageHere");
    this.node = element(
      "form",
      { class: "composer" },
      say(element("label", { for: id, class: "visually-hidden" }), "message"),
      this.#field,
      this.#button,
    );
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#sendOrStop(onSend);
    });
    this.#button.addEventListener("click", (event) => {
      // The second click of a double click would stop the answer again.
      if (event.detail > 1) event.preventDefault();
    });
    this.#field.addEventListener("keydown", (event) => this.#onKey(event, onSend));
    this.update();
  }

  /** Switches the button between send and stop. */
  update() {
    const action = this.#conversation.busy ? "stop" : "send";
    if (action === this.#shown) return;
    this.#shown = action;
    this.#button.dataset.action = action;
    this.#button.replaceChildren(icon(action));
    describe(this.#button, "hint", action);
  }

  focus() {
    this.#field.focus();
  }

  #onKey(event, onSend) {
    if (event.key !== "Enter" || event.shiftKey) return;
    if (isComposing(event)) return;
    event.preventDefault();
    // Text typed during an answer stays until the answer has ended.
    if (!this.#conversation.busy) this.#send(onSend);
  }

  #sendOrStop(onSend) {
    if (this.#conversation.busy) this.#conversation.stop();
    else this.#send(onSend);
    this.focus();
  }

  #send(onSend) {
    const question = this.#field.value.trim();
    if (question === "") return;
    this.#field.value = "";
    onSend(question);
  }
}
