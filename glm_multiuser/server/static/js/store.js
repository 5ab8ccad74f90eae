/** The browser's storage. Nothing here throws: a page without storage is still usable, so errors are
 * only reported to the listeners. */

// Servers under two paths of one proxy share the storage. Same prefix as in first_paint.js.
const PREFIX = `glm-multiuser${location.pathname.replace(/\/$/, "")}.`;

class Store extends EventTarget {
  #area;
  /** Errors so far, as text keys. */
  troubles = new Set();

  constructor(nameOfArea) {
    super();
    try {
      // With cookies blocked, even reading the property throws.
      this.#area = window[nameOfArea];
    } catch {
      this.#area = null;
    }
  }

  /** Returns the value stored under `name`; undefined if missing or unreadable. */
  read(name) {
    let text;
    try {
      text = this.#area?.getItem(PREFIX + name) ?? null;
      return text === null ? undefined : JSON.parse(text);
    } catch {
      this.reject(name);
      return undefined;
    }
  }

  write(name, value) {
    try {
      if (this.#area === null) throw new Error("storage is blocked");
      this.#area.setItem(PREFIX + name, JSON.stringify(value));
    } catch {
      this.#report("notKept");
    }
  }

  remove(name) {
    try {
      this.#area?.removeItem(PREFIX + name);
    } catch {
      this.#report("notKept");
    }
  }

  /** Removes a malformed value. */
  reject(name) {
    this.remove(name);
    this.#report("notReadable");
  }

  /** Calls `listener(name, value)` when another tab changes a value. */
  watch(listener) {
    window.addEventListener("storage", ({ key, storageArea }) => {
      if (storageArea !== this.#area || !key?.startsWith(PREFIX)) return;
      const name = key.slice(PREFIX.length);
      listener(name, this.read(name));
    });
  }

  #report(trouble) {
    // Once: a dismissed notice must not return at every token.
    if (this.troubles.has(trouble)) return;
    this.troubles.add(trouble);
    this.dispatchEvent(new CustomEvent("trouble", { detail: trouble }));
  }
}

export const kept = new Store("localStorage");
export const session = new Store("sessionStorage");
