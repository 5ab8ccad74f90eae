/** Polls the server's status every second while the page is visible. */

import { Failure } from "./failures.js";
import { status } from "./server.js";

const EVERY = 1000;

/** Event "news"; detail: `{status}` as the server sends it, or `{failure}`: the failure's kind. */
class Live extends EventTarget {
  #timer = 0;
  #asking = false;

  start() {
    document.addEventListener("visibilitychange", () => this.#ask());
    this.#ask();
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    const detail = await news();
    this.#asking = false;
    this.dispatchEvent(new CustomEvent("news", { detail }));
    this.#timer = setTimeout(() => this.#ask(), EVERY);
  }
}

async function news() {
  try {
    return { status: await status() };
  } catch (error) {
    return { failure: error instanceof Failure ? error.kind : "unreachable" };
  }
}

export const live = new Live();
