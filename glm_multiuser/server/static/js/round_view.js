/** A question and its answer on the page. */

import { copy } from "./clipboard.js";
import { element, icon, iconButton } from "./dom.js";
import { failureView } from "./failure_view.js";
import { describe, number, say } from "./i18n.js";
import { showMarkdown } from "./markdown.js";
import { notify } from "./notices.js";

const MARKS = { stopped: "stopped", interrupted: "interrupted" };
const NOT_YET = { held: "held", waiting: "waiting" };
const COPIED_FOR = 1500;
// A long answer takes long to draw. Between two drawings it leaves the page this many times as
// long to everything else: other answers, keys, buttons.
const REST = 3;

export class RoundView {
  #round;
  #onAgain;
  #onGrow;
  #frame = 0;
  #restUntil = 0;
  #drawn = "";
  #shownFailure = null;
  #text = element("div", { class: "markdown" });
  #notYet = element("p", { class: "not-yet" }, element("span"));
  #mark = element("p", { class: "mark" });
  #failure = element("div", { class: "failure-place" });
  #usage = element("span", { class: "usage" });
  #copy = iconButton("copy", "copy", () => this.#copyAnswer());
  #again = iconButton("again", "again", () => this.#onAgain());
  #answer;

  /** `onAgain` asks the question once more; `onGrow` hears that the node may be taller now. */
  constructor(round, onAgain, onGrow) {
    this.#round = round;
    this.#onAgain = onAgain;
    this.#onGrow = onGrow;
    const tools = element("div", { class: "answer-tools" }, this.#copy, this.#again, this.#usage);
    const dots = element("span", { class: "dots", "aria-hidden": "true" });
    dots.append(element("i"), element("i"), element("i"));
    this.#notYet.prepend(dots);
    this.#answer = element(
      "div",
      { class: "answer" },
      say(element("h3", { class: "visually-hidden" }), "answer"),
      this.#notYet,
      this.#text,
      this.#mark,
      this.#failure,
      tools,
    );
    this.node = element(
      "article",
      { class: "round" },
      say(element("h3", { class: "visually-hidden" }), "you"),
      element("p", { class: "question" }, round.question),
      this.#answer,
    );
  }

  /** Shows the round as it is now. Only the last round of an idle conversation can be redone. */
  update({ canRedo }) {
    const { state, answer, finish, failure } = this.#round;
    if (state === "streaming") this.#drawSoon();
    else this.#draw();
    // Most changes are one more token, and those change nothing but the text.
    if (state === "streaming" && this.#answer.dataset.state === state) return;
    this.#answer.dataset.state = state;
    this.#showLine(this.#notYet, NOT_YET[state], this.#notYet.lastChild);
    this.#showLine(this.#mark, MARKS[state] ?? (finish === "length" ? "cutOff" : undefined));
    this.#showFailure(state === "failed" ? failure : null);
    this.#copy.hidden = answer === "" || state === "streaming";
    // A failure has a button of its own for that.
    this.#again.hidden = !canRedo || state === "failed";
    this.#showUsage();
    this.#onGrow();
  }

  #drawSoon() {
    this.#frame ||= requestAnimationFrame((now) => {
      this.#frame = 0;
      if (now < this.#restUntil) this.#drawSoon();
      else this.#draw();
    });
  }

  /** Not left to a frame at the end: a tab in the background gets none. */
  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (this.#drawn === this.#round.answer) return;
    this.#drawn = this.#round.answer;
    const begin = performance.now();
    showMarkdown(this.#text, this.#drawn);
    this.#onGrow();
    const end = performance.now();
    this.#restUntil = end + REST * (end - begin);
  }

  #showLine(node, name, place = node) {
    node.hidden = name === undefined;
    if (name !== undefined) say(place, name);
  }

  #showFailure(failure) {
    if (failure === this.#shownFailure) return;
    this.#shownFailure = failure;
    this.#failure.replaceChildren(...(failure ? [failureView(failure, this.#onAgain)] : []));
  }

  #showUsage() {
    const { usage, seconds, state } = this.#round;
    const known = state === "done" && usage && seconds;
    this.#usage.hidden = !known;
    if (!known) return;
    const tokens = usage.completion_tokens;
    say(this.#usage, "usage", { tokens, seconds: number(seconds, 1) });
  }

  async #copyAnswer() {
    if (!(await copy(this.#round.answer))) {
      notify("notCopied");
      return;
    }
    this.#showCopied("check", "copied");
    setTimeout(() => this.#showCopied("copy", "copy"), COPIED_FOR);
  }

  #showCopied(image, hint) {
    this.#copy.replaceChildren(icon(image));
    describe(this.#copy, "hint", hint);
  }
}
