/** One conversation: its questions and answers, including a streaming one. To the server each
 * conversation is a separate user. */

import { Failure } from "./failures.js";
import { lanes } from "./lanes.js";
import { answerTo } from "./server.js";
import { settings } from "./settings.js";
import { addParts } from "./tool_calls.js";

const UNANSWERED = {
  answer: "",
  calls: [],
  state: "waiting",
  failure: null,
  finish: null,
  usage: null,
  seconds: null,
  before: null,
};

const LONGEST_TITLE = 60;

/**
 * A round is a question with its answer. Its state is "held" (the browser has no connection left),
 * "waiting", "streaming", "done", "stopped" (by the user), "interrupted" (the page went away),
 * "elsewhere" (another tab receives it) or "failed". `before` is the round with its old answer while
 * a new one has not begun.
 *
 * Events: "rounds" (rounds were added or removed), "round" (detail: the changed round), "name" (or its
 * substitute, see `title`), "model", "busy" (an answer began or ended), "ended" (detail: the round as
 * it ended), "kept" (there is no new answer, so the old one stays).
 */
export class Conversation extends EventTarget {
  #controller = null;

  constructor({ id, number, name, model, rounds }) {
    super();
    this.id = id;
    this.number = number;
    this.name = name;
    this.model = model;
    this.rounds = rounds;
  }

  /** The user's name for it, else the beginning of its first question; "" without questions. */
  get title() {
    if (this.name || this.rounds.length === 0) return this.name;
    const words = this.rounds[0].question.replaceAll(/\s+/g, " ").trim();
    const letters = [...words];
    if (letters.length <= LONGEST_TITLE) return words;
    return `${letters.slice(0, LONGEST_TITLE - 1).join("")}…`;
  }

  get busy() {
    return this.#controller !== null;
  }

  /** Asks a question, unless an answer is running. */
  ask(question) {
    if (this.busy) return;
    this.#setRounds([...this.rounds, { question, ...UNANSWERED }]);
    return this.#answer(this.rounds.at(-1));
  }

  /** Asks the last question again and replaces its answer, unless the server gives no new one. */
  askAgain() {
    if (this.busy || this.rounds.length === 0) return;
    const round = this.rounds.at(-1);
    return this.#answer(round, round.state === "done" ? { ...round } : null);
  }

  /** Replaces the question of `round` and asks it; removes all later rounds. */
  edit(round, question) {
    const place = this.rounds.indexOf(round);
    if (this.busy || place < 0) return;
    this.rounds = this.rounds.slice(0, place);
    return this.ask(question);
  }

  stop() {
    this.#controller?.abort();
  }

  clear() {
    this.stop();
    this.#controller = null;
    this.#setRounds([]);
    this.#emit("busy");
  }

  rename(name) {
    this.name = name;
    this.#emit("name");
  }

  /** Sets the model for further questions; "" means the one from the settings. */
  choose(model) {
    this.model = model;
    this.#emit("model");
  }

  /** Applies another tab's changes; during an answer, only the name, the model, and whether the
   * conversation was cleared. */
  replace({ name, model, rounds }) {
    if (this.busy && rounds.length > 0) {
      this.rename(name);
      this.choose(model);
      return;
    }
    if (this.busy) this.clear();
    // Before any event: listeners save the conversation, and the other tab reads that.
    Object.assign(this, { name, model });
    this.#setRounds(this.#updated(rounds));
    this.#emit("model");
  }

  /** Keeps the objects of existing rounds: the user may be editing their question. */
  #updated(rounds) {
    let same = true;
    return rounds.map((round, place) => {
      same &&= this.rounds[place]?.question === round.question;
      return same ? Object.assign(this.rounds[place], round) : round;
    });
  }

  #setRounds(rounds) {
    this.rounds = rounds;
    this.#emit("rounds");
    this.#emit("name");
  }

  async #answer(round, before = null) {
    const controller = new AbortController();
    this.#controller = controller;
    Object.assign(round, UNANSWERED, { calls: [], before });
    this.#emit("busy");
    this.#changed(round);
    let ended = round;
    try {
      await this.#receive(round, controller.signal);
      round.state = "done";
    } catch (error) {
      this.#endEarly(round, error, controller.signal);
      if (round.before) {
        ended = { ...round };
        this.#keep(round);
      }
    }
    round.before = null;
    // If the conversation was cleared meanwhile, another answer may be running.
    if (this.#controller === controller) this.#controller = null;
    this.#changed(round);
    this.#emit("busy");
    this.#emit("ended", ended);
  }

  async #receive(round, signal) {
    await lanes.enter(signal, () => this.#moved(round, "held"));
    try {
      this.#moved(round, "waiting");
      const begin = performance.now();
      const options = { user: this.id, model: this.model, signal };
      for await (const part of answerTo(this.#messagesFor(round), options)) {
        if ("text" in part) {
          round.answer += part.text;
          round.state = "streaming";
        }
        if ("calls" in part) addParts(round.calls, part.calls);
        if ("finish" in part) round.finish = part.finish;
        if ("usage" in part) round.usage = part.usage;
        if (round.answer !== "" || round.calls.length > 0) round.before = null;
        this.#changed(round);
      }
      round.seconds = (performance.now() - begin) / 1000;
    } finally {
      lanes.leave();
    }
  }

  #keep(round) {
    const { state, before } = round;
    Object.assign(round, before);
    if (state === "failed") this.#emit("kept");
  }

  #endEarly(round, error, signal) {
    if (signal.aborted) {
      round.state = "stopped";
      return;
    }
    round.state = "failed";
    const { kind, detail, retryAfter } =
      error instanceof Failure ? error : new Failure("failed", error.message);
    round.failure = { kind, detail, retryAt: retryAfter && Date.now() + retryAfter * 1000 };
  }

  /**
   * The messages up to `round`. Rounds without a complete answer are left out with their question:
   * the model should not continue from half a sentence or from a tool call that was not run, and a
   * server rejects two user messages in a row.
   */
  #messagesFor(round) {
    const messages = [];
    if (settings.systemPrompt) messages.push({ role: "system", content: settings.systemPrompt });
    for (const { question, answer, calls, state } of this.rounds) {
      if (state !== "done" || answer.trim() === "" || calls.length > 0) continue;
      messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
    }
    return [...messages, { role: "user", content: round.question }];
  }

  #moved(round, state) {
    round.state = state;
    this.#changed(round);
  }

  #changed(round) {
    this.#emit("round", round);
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
