/** How many answers stream at once. A browser opens six connections to one server over HTTP/1.1 and
 * silently holds back every further request, the live panel's included. */

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

/** Whether this page came over HTTP/1.x; a proxy may speak HTTP/2, which needs one connection. */
function connectionsAreFew() {
  const [navigation] = performance.getEntriesByType("navigation");
  return !/^h[23]/.test(navigation?.nextHopProtocol ?? "");
}

export const lanes = new Lanes();
