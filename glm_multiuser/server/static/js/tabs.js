/** The tabs of a narrow screen: one per conversation and one for the live panel. */

import { element } from "./dom.js";
import { say } from "./i18n.js";
import { sayTitle } from "./names.js";

export const LIVE = "live";
const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

export class Tabs {
  #list = document.querySelector("#tabs");
  #tabs = new Map();
  #onSelect;

  /** `onSelect` receives the id of the conversation, or LIVE. */
  constructor(onSelect) {
    this.#onSelect = onSelect;
    this.#add(LIVE, "live", say(element("span"), "live"));
    this.#list.addEventListener("keydown", (event) => this.#onKey(event));
  }

  add(conversation) {
    const { id, number } = conversation;
    const name = sayTitle(element("span", { class: "tab-name" }), conversation);
    const busy = say(element("span", { class: "visually-hidden" }), "answering");
    busy.hidden = true;
    const tab = this.#add(id, `pane-${id}`, element("span", { class: "hue" }), name, busy);
    tab.dataset.hue = number % 8;
    conversation.addEventListener("name", () => sayTitle(name, conversation));
    conversation.addEventListener("busy", () => {
      tab.toggleAttribute("data-busy", conversation.busy);
      busy.hidden = !conversation.busy;
    });
    // The live panel stays last.
    this.#list.append(this.#tabs.get(LIVE));
  }

  remove({ id }) {
    this.#tabs.get(id).remove();
    this.#tabs.delete(id);
  }

  select(selected) {
    for (const [id, tab] of this.#tabs) {
      tab.setAttribute("aria-selected", id === selected);
      // Roving tabindex: one stop for the Tab key, arrow keys in between.
      tab.tabIndex = id === selected ? 0 : -1;
    }
    this.#tabs.get(selected)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  #add(id, controls, ...children) {
    const attributes = { type: "button", role: "tab", class: "tab", "aria-controls": controls };
    const tab = element("button", attributes, ...children);
    tab.id = `tab-${id}`;
    tab.addEventListener("click", () => this.#onSelect(id));
    this.#tabs.set(id, tab);
    this.#list.append(tab);
    return tab;
  }

  #onKey(event) {
    const tabs = [...this.#list.children];
    const at = tabs.indexOf(document.activeElement);
    const ends = { Home: 0, End: tabs.length - 1 };
    const next = ends[event.key] ?? (event.key in STEPS ? at + STEPS[event.key] : null);
    if (next === null) return;
    event.preventDefault();
    const tab = tabs.at(next % tabs.length);
    tab.focus();
    tab.click();
  }
}
