/** What the browser keeps between visits. Nothing here throws: a page that cannot keep its history
 * is still a page to talk in, so errors are reported to the listeners and work goes on. */

// Servers under two paths of one proxy have the same storage. As in first_paint.js.
const PREFIX = `glm-multiuser${location.pathname.replace(/\/$/, "")}.`;

class Store extends EventTarget {
  #area;
  /** What has gone wrong so far, by the name of the text that says so. */
  troubles = new Set();

  constructor(nameOfArea) {
    super();
    try {
      // Where cookies are blocked, already reading the property throws.
      this.#area = window[nameOfArea];
    } catch {
      this.#area = null;
    }
  }

  /** The value kept under `name`, or undefined when there is none or it cannot be read. */
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

  /** Forgets a value that is there but makes no sense. */
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
    // Once: who has dismissed it need not hear of it at every token.
    if (this.troubles.has(trouble)) return;
    this.troubles.add(trouble);
    this.dispatchEvent(new CustomEvent("trouble", { detail: trouble }));
  }
}

export const kept = new Store("localStorage");
export const session = new Store("sessionStorage");
