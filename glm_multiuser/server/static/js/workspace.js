/** All conversations of the page: side by side if there is room, else one at a time. */

import * as history from "./history.js";
import { models } from "./models.js";
import { Pane } from "./pane.js";
import { settings } from "./settings.js";
import { kept, session } from "./store.js";
import { LIVE, Tabs } from "./tabs.js";

const AT_FIRST = 2;
const NARROWEST_PANE = 320;
const LONGEST_ROW = 3;
const NARROW = window.matchMedia("(max-width: 759px)");

export class Workspace {
  /** Whether the current changes come from another tab. */
  #follows = false;
  #conversations = [];
  #panes = new Map();
  #place = document.querySelector("#panes");
  #livePanel = document.querySelector("#live");
  #tabs = new Tabs((id) => this.#select(id));
  #selected;

  constructor() {
    for (const conversation of history.keptConversations()) this.#show(conversation);
    if (this.#conversations.length === 0) this.#startWith(AT_FIRST);
    this.#select(this.find(session.read("selected")) ? session.read("selected") : this.#first);
    this.#setRoles();
    new ResizeObserver(() => this.#arrange()).observe(this.#place);
    NARROW.addEventListener("change", () => this.#setRoles());
    kept.watch((name, value) => this.#followOtherTab(name, value));
    for (const source of [models, settings]) {
      source.addEventListener("change", () => this.#updatePanes());
    }
    this.#panes.get(this.#selected)?.focus();
  }

  find(id) {
    return this.#conversations.find((conversation) => conversation.id === id);
  }

  /** Adds an empty conversation and selects it. */
  add() {
    this.#startWith(1);
    this.#goTo(this.#conversations.at(-1).id);
  }

  #startWith(count) {
    for (let made = 0; made < count; made += 1) {
      const conversation = history.newConversation(this.#freeNumber());
      this.#show(conversation);
      history.keep(conversation);
    }
    history.keepOrder(this.#conversations);
  }

  #freeNumber() {
    const taken = this.#conversations.map(({ number }) => number);
    let number = 1;
    while (taken.includes(number)) number += 1;
    return number;
  }

  #show(conversation) {
    const pane = new Pane(conversation, () => this.#close(conversation));
    this.#conversations.push(conversation);
    this.#panes.set(conversation.id, pane);
    this.#place.append(pane.node);
    this.#tabs.add(conversation);
    const keepOn = (types, keep) => {
      for (const type of types) {
        conversation.addEventListener(type, () => this.#keepIfShown(conversation, keep));
      }
    };
    keepOn(["round"], history.keepSoon);
    keepOn(["name", "model", "ended"], history.keep);
    pane.node.addEventListener("focusin", () => this.#select(conversation.id));
    this.#setRoles();
    this.#arrange();
  }

  #keepIfShown(conversation, keep) {
    if (this.#follows) return;
    // The answer of a closed conversation ends after its removal.
    if (!this.#conversations.includes(conversation)) return;
    keep(conversation);
    // The browser's data may have been deleted meanwhile.
    if (history.keptIds().length === 0) history.keepOrder(this.#conversations);
  }

  #updatePanes() {
    for (const pane of this.#panes.values()) pane.update();
  }

  #close(conversation) {
    const place = this.#conversations.indexOf(conversation);
    // Another tab may have closed it during the confirmation.
    if (place < 0) return;
    this.#takeAway(conversation);
    if (this.#conversations.length === 0) this.#startWith(1);
    history.keepOrder(this.#conversations);
    this.#goTo((this.#conversations[place] ?? this.#conversations.at(-1)).id);
  }

  #takeAway(conversation) {
    this.#conversations = this.#conversations.filter((one) => one !== conversation);
    conversation.stop();
    history.stopKeeping(conversation);
    // Also if another tab has: this one may have saved it before it heard of that.
    history.forget(conversation);
    this.#panes.get(conversation.id).node.remove();
    this.#panes.delete(conversation.id);
    this.#tabs.remove(conversation);
    this.#arrange();
  }

  #goTo(id) {
    this.#select(id);
    this.#panes.get(id).focus();
  }

  /** Selects what a narrow screen shows: a conversation or the live panel. */
  #select(id) {
    this.#selected = id;
    for (const [one, { node }] of this.#panes) node.toggleAttribute("data-selected", one === id);
    this.#livePanel.toggleAttribute("data-selected", id === LIVE);
    this.#tabs.select(id);
    session.write("selected", id);
  }

  /** Sets the number of columns: all that fit, with balanced rows. */
  #arrange() {
    const count = this.#conversations.length;
    const fitting = Math.max(1, Math.floor(this.#place.clientWidth / NARROWEST_PANE));
    const rows = Math.max(Math.ceil(count / fitting), count > LONGEST_ROW ? 2 : 1);
    this.#place.style.setProperty("--columns", Math.ceil(count / rows));
  }

  /** Panes and live panel are tab panels only if there are tabs. */
  #setRoles() {
    for (const { node } of this.#panes.values()) {
      node.setAttribute("role", NARROW.matches ? "tabpanel" : "region");
    }
    this.#livePanel.setAttribute("role", NARROW.matches ? "tabpanel" : "group");
  }

  /** Browser tabs share one history: shows another tab's changes. */
  #followOtherTab(name, value) {
    if (name === "conversations") this.#followOrder();
    for (const conversation of this.#conversations) {
      const read =
        name === history.keyOf(conversation.id) && history.readConversation(value, "elsewhere");
      if (!read) continue;
      // Writing it back could undo later changes of the other tab.
      this.#follows = true;
      conversation.replace(read);
      this.#follows = false;
    }
  }

  #followOrder() {
    const ids = history.keptIds();
    // Empty only if damaged.
    if (ids.length === 0) return;
    for (const conversation of this.#conversations) {
      if (!ids.includes(conversation.id)) this.#takeAway(conversation);
    }
    for (const id of ids) {
      const conversation = this.find(id) ? null : history.keptConversation(id);
      if (conversation) this.#show(conversation);
    }
    if (!this.find(this.#selected) && this.#selected !== LIVE) this.#select(this.#first);
  }

  get #first() {
    return this.#conversations[0].id;
  }
}
