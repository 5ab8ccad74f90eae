/** Server-sent events, read from the bytes of a response. */

/**
 * Takes a stream of text apart into the data of its events. Pieces may end anywhere, also between
 * the two characters of a line end.
 */
export class EventParser {
  #line = "";
  #data = [];
  #afterReturn = false;

  /** Returns the data of every event that `text` completes. */
  push(text) {
    const complete = [];
    // A \r that ended the last piece has already ended its line; its \n must not end another one.
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
    // An empty field name is a comment: servers send those to keep the connection open.
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
      // The decoder keeps the first bytes of a character whose last ones are still on their way.
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    // A reader that stops early must not leave the response open.
    reader.cancel().catch(() => {});
  }
}
