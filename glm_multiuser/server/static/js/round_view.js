/** The view of a question and its answer. */

import { copyIconButton } from "./copy_button.js";
import { element, iconButton } from "./dom.js";
import { failureView } from "./failure_view.js";
import { number, say } from "./i18n.js";
import { isJson } from "./json.js";
import { showMarkdown } from "./markdown.js";
import { QuestionView } from "./question_view.js";
import { written } from "./tool_calls.js";
import { jsonView, toolCallsView } from "./tool_calls_view.js";

const MARKS = { stopped: "stopped", interrupted: "interrupted", elsewhere: "elsewhere" };
const NOT_YET = { held: "held", waiting: "waiting" };
// Ratio of idle time to drawing time of all answers together: long ones are slow to draw, and keys
// and buttons need their share.
const REST = 3;
// Milliseconds.
const FRAME = 16;
let restUntil = 0;

export class RoundView {
  #round;
  #onAgain;
  #onGrow;
  #frame = 0;
  #drawn = "";
  #drawnAsJson = false;
  #shownFailure = null;
  #shownCalls = null;
  #question;
  #text = element("div", { class: "markdown" });
  #calls = element("div", { class: "calls" });
  #notYet = element("p", { class: "not-yet" }, element("span"));
  #mark = element("p", { class: "mark" });
  #failure = element("div", { class: "failure-place" });
  #usage = element("span", { class: "usage" });
  #copy = copyIconButton("copy", () => this.#asText());
  #again = iconButton("again", "again", () => this.#onAgain());
  #answer;

  /**
   * `onAgain` asks the question again; `onEdit` receives its replacement; `onGrow` is called when
   * more of a streaming answer is shown.
   */
  constructor(round, { onAgain, onEdit, onGrow }) {
    this.#round = round;
    this.#question = new QuestionView(round.question, onEdit);
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
      this.#calls,
      this.#mark,
      this.#failure,
      tools,
    );
    this.node = element(
      "article",
      { class: "round" },
      say(element("h3", { class: "visually-hidden" }), "you"),
      this.#question.node,
      this.#answer,
    );
  }

  /**
   * Updates the view. In an idle conversation the last round can be regenerated, and every round
   * edited.
   */
  update({ canEdit, canRedo }) {
    const { state, calls, failure } = this.#round;
    if (state === "streaming") this.#drawSoon();
    else this.#draw();
    // Most changes are one more token and affect only the text.
    if (state === "streaming" && this.#answer.dataset.state === state) return;
    this.#answer.dataset.state = state;
    this.#question.update({ canEdit });
    this.#showCalls(state === "done" ? calls : null);
    this.#showLine(this.#notYet, NOT_YET[state], this.#notYet.lastChild);
    this.#showLine(this.#mark, this.#markOf(this.#round));
    this.#showFailure(state === "failed" ? failure : null);
    this.#copy.hidden = this.#asText() === "" || state === "streaming";
    // A failure has its own button for that.
    this.#again.hidden = !canRedo || state === "failed" || state === "elsewhere";
    this.#showUsage();
  }

  #drawSoon() {
    this.#frame ||= requestAnimationFrame((now) => {
      this.#frame = 0;
      // Answers that are quick to draw share a frame.
      if (restUntil - now > FRAME) {
        this.#drawSoon();
        return;
      }
      const begin = performance.now();
      this.#draw();
      this.#onGrow();
      restUntil = Math.max(restUntil, now) + (1 + REST) * (performance.now() - begin);
    });
  }

  /** At the end called directly: background tabs get no frames. */
  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { answer, state } = this.#round;
    const asJson = state === "done" && isJson(answer);
    if (this.#drawn === answer && this.#drawnAsJson === asJson) return;
    this.#drawn = answer;
    this.#drawnAsJson = asJson;
    if (asJson) this.#text.replaceChildren(jsonView(answer));
    else showMarkdown(this.#text, answer);
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

  #showCalls(calls) {
    if (calls === this.#shownCalls) return;
    this.#shownCalls = calls;
    this.#calls.replaceChildren(...toolCallsView(calls ?? []));
  }

  #markOf({ state, answer, calls, finish }) {
    if (state in MARKS) return MARKS[state];
    if (state === "done" && calls.length > 0) return "noTools";
    if (finish === "length") return "cutOff";
    return state === "done" && answer.trim() === "" ? "emptyAnswer" : undefined;
  }

  #asText() {
    const { answer, calls } = this.#round;
    return [answer, ...calls.map(written)].filter(Boolean).join("\n");
  }
}
