/** Which model a conversation talks to. */

import { element } from "./dom.js";
import { describe, phrase } from "./i18n.js";
import { models } from "./models.js";
import { settings } from "./settings.js";

export class ModelChoice {
  #conversation;
  #select = element("select");
  #only = element("span");
  #shown = "";

  constructor(conversation) {
    this.#conversation = conversation;
    describe(this.#select, "hint", "modelHere");
    this.#select.addEventListener("change", () => conversation.choose(this.#select.value));
    this.node = element("p", { class: "pane-model" }, this.#only, this.#select);
    this.update();
  }

  /** A choice where there is one: the default, every other model, and what was chosen before. */
  update() {
    const chosen = this.#conversation.model;
    const preset = settings.values.model ?? models.first;
    const others = new Set(models.names);
    others.delete(preset);
    if (chosen) others.add(chosen);
    this.#select.hidden = others.size === 0;
    this.#only.hidden = others.size > 0;
    this.#only.textContent = preset;
    this.#offer(preset, [...others]);
    this.#select.value = chosen;
  }

  #offer(preset, others) {
    const label = phrase("modelDefault", { name: preset });
    const labels = [label, ...others.map((name) => this.#labelOf(name))];
    // A list that is open stays as it is until it changes.
    if (String(labels) === this.#shown) return;
    this.#shown = String(labels);
    const values = ["", ...others];
    this.#select.replaceChildren(
      ...values.map((value, at) => element("option", { value }, labels[at])),
    );
  }

  #labelOf(name) {
    return models.names.includes(name) ? name : phrase("modelGone", { name });
  }
}
