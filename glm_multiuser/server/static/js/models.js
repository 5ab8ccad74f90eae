/** The models currently offered by the server. */

import { live } from "./live.js";

/** Event "change". */
class Models extends EventTarget {
  /** Models that answer questions. */
  names = [];
  /** The default model, for requests without a model. */
  first = "";

  constructor() {
    super();
    live.addEventListener("news", ({ detail }) => this.#take(detail.status?.models ?? []));
  }

  #take(models) {
    // A server that is briefly unreachable still has its models.
    if (models.length === 0) return;
    const names = models.filter(({ state }) => state === "ready").map(({ name }) => name);
    if (models[0].name === this.first && String(names) === String(this.names)) return;
    this.names = names;
    this.first = models[0].name;
    this.dispatchEvent(new Event("change"));
  }
}

export const models = new Models();
