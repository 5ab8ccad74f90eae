/** The live panel: the server's current state. */

import { Chart } from "./chart.js";
import { describe, number, say } from "./i18n.js";
import { live } from "./live.js";
import { Slots } from "./slots.js";

export class Panel {
  #node = document.querySelector("#live");
  #state = document.querySelector("#server-state");
  #chart = new Chart();
  #slots;

  /** `find` returns the conversation of a session, if it belongs to this page. */
  constructor(find) {
    this.#slots = new Slots(find);
    this.#part("chart-place").append(this.#chart.node);
    this.#part("slots-place").append(this.#slots.node);
    live.addEventListener("news", ({ detail }) => this.#show(detail));
  }

  #show({ status, failure }) {
    this.#node.toggleAttribute("data-stale", failure !== undefined);
    if (failure) {
      this.#showState(failure === "key" ? "key" : "unreachable");
      return;
    }
    this.#showState(status.state);
    this.#showLoading(status.loading);
    this.#showSpeed(status.tokens_per_second);
    this.#slots.update(status);
    const { totals, queue, cache_bytes: caches } = status;
    say(this.#part("queue"), "queueOf", {
      waiting: number(queue.waiting),
      limit: number(queue.limit),
    });
    this.#showSessions(status.sessions);
    this.#part("requests").textContent = number(totals.requests);
    this.#part("tokens-generated").textContent = number(totals.tokens_generated);
    say(this.#part("cache-memory"), "megabytesOf", {
      resident: number(caches.resident / 1e6),
      reserved: number(caches.reserved / 1e6),
    });
    this.#part("compiles").textContent = number(totals.compiles_after_ready);
  }

  /** Hidden on a server that keeps none. */
  #showSessions({ in_memory: memory, on_disk: disk, restored }) {
    this.#part("sessions-line").hidden = !(memory || disk || restored);
    say(this.#part("sessions"), "sessionsOf", {
      memory: number(memory),
      disk: number(disk),
      restored: number(restored),
    });
  }

  #showState(state) {
    // Updated only on change: screen readers announce it.
    if (this.#state.dataset.state === state) return;
    this.#state.dataset.state = state;
    say(this.#state.lastElementChild, `state_${state}`);
  }

  #showLoading(loading) {
    this.#part("loading").hidden = loading === null;
    if (loading === null) return;
    const bar = this.#part("progress");
    bar.max = Math.max(1, loading.total);
    bar.value = loading.done;
    say(this.#part("loading-text"), "loading", loading);
    this.#part("loading-count").textContent = `${number(loading.done)} / ${number(loading.total)}`;
  }

  #showSpeed({ now, last_minute: lastMinute }) {
    const top = this.#chart.draw(lastMinute);
    const most = Math.max(0, ...lastMinute);
    this.#part("now").textContent = number(now);
    this.#part("top").textContent = number(top);
    describe(this.#chart.node, "label", "chart", { now: number(now), most: number(most) });
  }

  #part(name) {
    return this.#node.querySelector(`[data-part=${name}]`);
  }
}
