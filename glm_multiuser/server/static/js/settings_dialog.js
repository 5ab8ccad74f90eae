/** The settings dialog. */

import { element } from "./dom.js";
import { Failure } from "./failures.js";
import { phrase, say } from "./i18n.js";
import { modelNames } from "./server.js";
import { settings } from "./settings.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["model", "system", "language", "theme"];

export class SettingsDialog {
  #dialog = document.querySelector("#settings");
  #form = this.#dialog.querySelector("form");

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#save();
      this.#dialog.close();
    });
    this.#form.elements.cancel.addEventListener("click", () => this.#dialog.close());
  }

  open() {
    if (this.#dialog.open) return;
    const { elements } = this.#form;
    this.#offerModels([], settings.values.model ?? "");
    for (const name of [...NUMBERS, ...TEXTS]) elements[name].value = settings.values[name] ?? "";
    elements.key.value = settings.key;
    elements.remember.checked = settings.rememberKey;
    this.#dialog.showModal();
    this.#fetchModels();
  }

  #save() {
    const { elements } = this.#form;
    const values = {};
    for (const name of NUMBERS) {
      if (elements[name].value !== "") values[name] = elements[name].valueAsNumber;
    }
    for (const name of TEXTS) values[name] = elements[name].value.trim();
    settings.change(values, elements.key.value.trim(), elements.remember.checked);
  }

  async #fetchModels() {
    const trouble = this.#dialog.querySelector("[data-part=trouble]");
    trouble.hidden = true;
    try {
      const names = await modelNames();
      this.#offerModels(names, this.#form.elements.model.value);
    } catch (error) {
      trouble.hidden = false;
      say(trouble, `failure_${error instanceof Failure ? error.kind : "failed"}`);
    }
  }

  /** Keeps the chosen model, even if the server does not offer it now. */
  #offerModels(names, chosen) {
    const options = names.map((name) => element("option", { value: name }, name));
    if (chosen && !names.includes(chosen)) {
      const gone = names.length > 0 ? phrase("modelGone", { name: chosen }) : chosen;
      options.push(element("option", { value: chosen }, gone));
    }
    const select = this.#form.elements.model;
    select.replaceChildren(say(element("option", { value: "" }), "serverDefault"), ...options);
    select.value = chosen;
  }
}
