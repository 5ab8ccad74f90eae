/** The models that the server offers now. */

import { live } from "./live.js";

/** Event "change". */
class Models extends EventTarget {
  /** Those that answer questions. */
  names = [];
  /** The one that answers requests that name none. */
  first = "";

  constructor() {
    super();
    live.addEventListener("news", ({ detail }) => this.#take(detail.status?.models ?? []));
  }

  #take(models) {
    // A server that cannot be reached for a moment has not lost its models.
    if (models.length === 0) return;
    const names = models.filter(({ state }) => state === "ready").map(({ name }) => name);
    if (models[0].name === this.first && String(names) === String(this.names)) return;
    this.names = names;
    this.first = models[0].name;
    this.dispatchEvent(new Event("change"));
  }
}

export const models = new Models();
