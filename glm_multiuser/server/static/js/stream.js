/** Parses server-sent events from the bytes of a response. */

/**
 * Splits a text stream into the data of its events. Chunks may end anywhere, also between \r and
 * \n.
 */
export class EventParser {
  #line = "";
  #data = [];
  #afterReturn = false;

  /** Returns the data of the events completed by `text`. */
  push(text) {
    const complete = [];
    // A \r at the end of the last chunk already ended its line; its \n must not end another.
    if (this.#afterReturn && text.startsWith("\n")) {
      text = text.slice(1);
      this.#afterReturn = false;
    }
    if (text !== "") this.#afterReturn = text.endsWith("\r");
    const lines = text.split(/\r\n|\n|\r/);
    const unfinished = lines.pop();
    for (const end of lines) {
      const data = this.#take(this.#line + end);
      this.#line = "";
      if (data !== null) complete.push(data);
    }
    this.#line += unfinished;
    return complete;
  }

  #take(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length > 0 ? data.join("\n") : null;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    // An empty field name is a comment, sent as keep-alive.
    if (field === "data") {
      const value = colon < 0 ? "" : line.slice(colon + 1);
      this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
    }
    return null;
  }
}

/** Yields the data of each event in a ReadableStream of bytes. */
export async function* eventsOf(bytes) {
  const reader = bytes.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // The decoder buffers incomplete characters.
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    // A consumer that stops early must not leave the response open.
    reader.cancel().catch(() => {});
  }
}
