/** The view of one conversation: header, rounds and composer. */

import { Composer } from "./composer.js";
import { confirmed } from "./confirm.js";
import { element, textButton } from "./dom.js";
import { titleOf } from "./failure_view.js";
import { describe, phrase, say } from "./i18n.js";
import { isComposing } from "./input_method.js";
import { labelWithTitle, nameOf } from "./names.js";
import { notify } from "./notices.js";
import { PaneHeader } from "./pane_header.js";
import { RoundView } from "./round_view.js";
import { written } from "./tool_calls.js";

const EXAMPLES = ["example1", "example2", "example3"];
// Pixels; positions are fractional on a zoomed page.
const AT_END = 2;
const NEARLY_AT_END = 40;

export class Pane {
  #conversation;
  #views = new Map();
  #header;
  #composer;
  #followsEnd = true;
  #scrolledTo = 0;
  #news = element("p", { class: "visually-hidden", role: "status" });
  #log = element("div", { class: "log", role: "log", "aria-live": "off", tabindex: 0 });

  /** `onClose` removes the conversation. */
  constructor(conversation, onClose) {
    this.#conversation = conversation;
    this.#header = new PaneHeader(
      conversation,
      () => this.#clear(),
      () => this.#close(onClose),
    );
    this.#composer = new Composer(conversation, (question) => this.#ask(question));
    describe(this.#log, "label", "messages");
    this.node = element(
      "section",
      { class: "pane", id: `pane-${conversation.id}`, "data-hue": conversation.number % 8 },
      this.#header.node,
      this.#log,
      this.#news,
      this.#composer.node,
    );
    this.#listen();
    this.#showRounds();
    this.update();
  }

  /** Updates title and model. */
  update() {
    labelWithTitle(this.node, this.#conversation);
    this.#header.update();
  }

  focus() {
    this.#composer.focus();
  }

  #listen() {
    const on = (type, listener) =>
      this.#conversation.addEventListener(type, ({ detail }) => listener(detail));
    on("rounds", () => this.#showRounds());
    on("round", (round) => this.#showRound(round));
    on("name", () => this.update());
    on("model", () => this.update());
    on("busy", () => this.#showBusy());
    on("ended", (round) => this.#announceEnd(round));
    on("kept", () => notify("answerKept"));
    this.node.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || isComposing(event) || !this.#conversation.busy) return;
      this.#conversation.stop();
      this.focus();
    });
    this.#log.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.#log;
      // The event of `#followEnd` comes a frame later, when the room may have changed.
      if (scrollTop === this.#scrolledTo) return;
      // Slow upward scrolling leaves the end, too.
      const near = scrollTop < this.#scrolledTo ? AT_END : NEARLY_AT_END;
      this.#followsEnd = scrollHeight - scrollTop - clientHeight < near;
      this.#scrolledTo = scrollTop;
    });
    // The size also changes behind a tab (to zero) and after a reload.
    new ResizeObserver(() => {
      // A keyboard that opens for an editor must not move it away.
      const isEdited = this.#log.querySelector(".question-editor :focus") !== null;
      if (!isEdited) this.#followEnd();
    }).observe(this.#log);
  }

  #ask(question) {
    this.#followsEnd = true;
    this.#conversation.ask(question);
  }

  #askAgain() {
    this.#conversation.askAgain();
    // The pressed button is removed, which would lose the focus.
    this.#log.focus();
  }

  #edit(round, question) {
    this.#followsEnd = true;
    this.#conversation.edit(round, question);
    // The edit field is removed as well.
    this.#log.focus();
  }

  #askExample({ target }) {
    this.#ask(target.textContent);
    this.#log.focus();
  }

  async #clear() {
    const { rounds } = this.#conversation;
    if (rounds.length === 0 || (await this.#agreed("clearQuestion", "clear"))) {
      this.#conversation.clear();
      this.focus();
    }
  }

  async #close(onClose) {
    const { rounds } = this.#conversation;
    if (rounds.length === 0 || (await this.#agreed("closeQuestion", "close"))) onClose();
  }

  #agreed(question, action) {
    const name = this.#conversation.title || this.#name;
    return confirmed(question, action, { name });
  }

  get #name() {
    return nameOf(this.#conversation);
  }

  #showRounds() {
    const { rounds } = this.#conversation;
    for (const [round, view] of this.#views) {
      if (rounds.includes(round)) continue;
      view.node.remove();
      this.#views.delete(round);
    }
    this.#log.querySelector(".empty")?.remove();
    if (rounds.length === 0) this.#log.append(this.#invitation());
    for (const round of rounds) {
      if (this.#views.has(round)) continue;
      const view = new RoundView(round, {
        onAgain: () => this.#askAgain(),
        onEdit: (question) => this.#edit(round, question),
        onGrow: () => this.#followEnd(),
      });
      this.#views.set(round, view);
      this.#log.append(view.node);
    }
    this.#updateViews();
  }

  #showRound(round) {
    this.#views.get(round)?.update(this.#possible(round));
    // Its text follows later.
    if (round.state !== "streaming") this.#followEnd();
  }

  #showBusy() {
    const { busy } = this.#conversation;
    this.#composer.update();
    this.node.toggleAttribute("data-busy", busy);
    this.#log.setAttribute("aria-busy", busy);
    if (busy) this.#announce("announceBegin");
    this.#updateViews();
  }

  #updateViews() {
    for (const [round, view] of this.#views) view.update(this.#possible(round));
    // Once: each call computes the layout.
    this.#followEnd();
  }

  #possible(round) {
    const { busy, rounds } = this.#conversation;
    return { canEdit: !busy, canRedo: !busy && round === rounds.at(-1) };
  }

  /** Announces the whole answer at once; token by token it would be noise. */
  #announceEnd({ state, answer, calls, failure }) {
    const all = [answer, ...calls.map(written)].filter(Boolean).join("\n");
    if (state === "done") this.#announce("announceAnswer", { answer: all });
    if (state === "stopped") this.#announce("announceStopped");
    if (state !== "failed") return;
    this.#announce("announceFailure", { title: titleOf(failure), detail: failure.detail });
  }

  /** Not by `say`: another language would announce it again. */
  #announce(text, values = {}) {
    this.#news.textContent = phrase(text, { name: this.#name, ...values });
  }

  #followEnd() {
    if (!this.#followsEnd || this.#views.size === 0) return;
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#scrolledTo = this.#log.scrollTop;
  }

  #invitation() {
    const examples = EXAMPLES.map((name) =>
      textButton(name, (event) => this.#askExample(event), "example"),
    );
    return element(
      "div",
      { class: "empty" },
      say(element("p", { class: "empty-title" }), "emptyTitle"),
      say(element("p"), "emptyText"),
      element("div", { class: "examples" }, ...examples),
    );
  }
}
