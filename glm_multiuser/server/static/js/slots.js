/** The list of slots with their users and states. */

import { element } from "./dom.js";
import { say } from "./i18n.js";
import { SlotRow } from "./slot_row.js";

export class Slots {
  #find;
  #headings = new Map();
  #lists = new Map();
  #rows = new Map();
  #none = element("p", { class: "soft" });
  node = element("div", { class: "slots" });

  /** `find` returns the conversation of a session, if it belongs to this page. */
  constructor(find) {
    this.#find = find;
  }

  /** Shows the slots grouped by model. */
  update({ slots, models }) {
    const nodes = [];
    for (const model of models) {
      nodes.push(this.#heading(model));
      const own = slots.filter((slot) => slot.model === model.name);
      if (own.length === 0) continue;
      const list = entry(this.#lists, model.name, () => element("ul", { class: "slot-list" }));
      replaceIfOther(
        list,
        own.map((slot) => this.#row(slot, model.seq_length)),
      );
      nodes.push(list);
    }
    replaceIfOther(this.node, nodes.length > 0 ? nodes : [say(this.#none, "noSlots")]);
  }

  #heading(model) {
    const heading = entry(this.#headings, model.name, () => newHeading(model.name));
    heading.state.dataset.state = model.state;
    say(heading.state, `model_${model.state}`);
    say(heading.size, "modelSize", { users: model.users, length: model.seq_length });
    return heading.node;
  }

  #row(slot, length) {
    const row = entry(this.#rows, `${slot.model} ${slot.slot}`, () => new SlotRow(slot.slot));
    row.show(slot, this.#find(slot.user), length);
    return row.node;
  }
}

function newHeading(name) {
  const state = element("span", { class: "model-state" });
  const size = element("span", { class: "soft" });
  const node = element("div", { class: "model" }, element("h4", {}, name), state, size);
  return { node, state, size };
}

function entry(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

/** Replaces the children only if they differ. */
function replaceIfOther(parent, nodes) {
  const old = parent.children;
  const same = old.length === nodes.length && nodes.every((node, at) => node === old[at]);
  if (!same) parent.replaceChildren(...nodes);
}
