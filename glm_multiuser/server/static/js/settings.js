/** The user's settings. An empty value means the server's default. */

import { kept, session } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const CHOICES = { language: ["en", "zh"], theme: ["light", "dark"] };

class Settings extends EventTarget {
  #values;
  key;
  rememberKey;

  constructor() {
    super();
    this.#read();
    kept.watch((name) => {
      if (name !== "settings" && name !== "key") return;
      // Saving stale values later would undo the other tab's changes.
      this.#read();
      this.dispatchEvent(new Event("change"));
    });
  }

  get language() {
    return this.#values.language ?? (navigator.language.startsWith("zh") ? "zh" : "en");
  }

  get systemPrompt() {
    return this.#values.system ?? "";
  }

  /** The stored form: only values that were set. */
  get values() {
    return this.#values;
  }

  /** The request fields for these settings. */
  forRequest() {
    const fields = NUMBERS.filter((name) => name in this.#values);
    const numbers = Object.fromEntries(fields.map((name) => [name, this.#values[name]]));
    return this.#values.model ? { model: this.#values.model, ...numbers } : numbers;
  }

  #read() {
    this.#values = readable(kept.read("settings"));
    this.rememberKey = typeof kept.read("key") === "string";
    this.key = text(this.rememberKey ? kept.read("key") : session.read("key"));
  }

  change(values, key, rememberKey) {
    this.#values = readable(values);
    kept.write("settings", this.#values);
    this.key = key;
    this.rememberKey = rememberKey;
    kept.remove("key");
    session.remove("key");
    if (key) (rememberKey ? kept : session).write("key", key);
    this.dispatchEvent(new Event("change"));
  }
}

/** Keeps only well-formed values: stored ones may be outdated or damaged. */
function readable(values) {
  const good = {};
  for (const name of NUMBERS) {
    if (Number.isFinite(values?.[name])) good[name] = values[name];
  }
  for (const name of ["model", "system"]) {
    if (text(values?.[name])) good[name] = values[name];
  }
  for (const [name, allowed] of Object.entries(CHOICES)) {
    if (allowed.includes(values?.[name])) good[name] = values[name];
  }
  return good;
}

function text(value) {
  return typeof value === "string" ? value : "";
}

export const settings = new Settings();
