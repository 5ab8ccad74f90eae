/** The model selector of a conversation. */

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

  /** Offers the default, every other model and the previous choice; a plain label if only one. */
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
    // An open list is not rebuilt without changes.
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
