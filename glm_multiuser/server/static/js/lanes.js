/** Limits concurrent streams. Over HTTP/1.1 a browser opens six connections per server and silently
 * queues every further request, including the live panel's. */

const FOR_ANSWERS = 5;

class Lanes {
  #taken = 0;
  #waiting = [];

  /** Resolves when an answer may start; call `leave` after it. Rejects when `signal` aborts. */
  async enter(signal, onWait) {
    if (this.#taken < FOR_ANSWERS || !connectionsAreFew()) {
      this.#taken += 1;
      return;
    }
    onWait();
    await new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal.addEventListener("abort", () => {
        const place = this.#waiting.indexOf(resolve);
        if (place < 0) return;
        this.#waiting.splice(place, 1);
        reject(signal.reason);
      });
    });
  }

  leave() {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#taken -= 1;
  }
}

/** Whether the page was loaded over HTTP/1.x; a proxy may offer HTTP/2 with one connection. */
function connectionsAreFew() {
  const [navigation] = performance.getEntriesByType("navigation");
  return !/^h[23]/.test(navigation?.nextHopProtocol ?? "");
}

export const lanes = new Lanes();
