/** One slot in the live panel. */

import { element } from "./dom.js";
import { describe, say, unsay } from "./i18n.js";
import { sayTitle } from "./names.js";

export class SlotRow {
  #name = element("span", { class: "slot-name" });
  #state = element("span", { class: "slot-state" });
  #tokens = element("span", { "aria-hidden": "true" });
  #tokensInWords = element("span", { class: "visually-hidden" });
  #bar = element("span", { class: "slot-bar", "aria-hidden": "true" });

  constructor(number) {
    this.node = element(
      "li",
      { class: "slot" },
      element("span", { class: "slot-number" }, String(number)),
      element("span", { class: "hue", "aria-hidden": "true" }),
      this.#name,
      element("span", { class: "slot-tokens" }, this.#tokens, this.#tokensInWords),
      this.#state,
      this.#bar,
    );
  }

  /**
   * @param slot as in the server's status.
   * @param conversation this page's conversation in the slot, if any.
   * @param length capacity of the slot in tokens.
   */
  show(slot, conversation, length) {
    this.node.dataset.state = slot.state;
    say(this.#state, `slot_${slot.state}`);
    if (conversation) this.node.dataset.hue = conversation.number % 8;
    else delete this.node.dataset.hue;
    if (conversation) sayTitle(this.#name, conversation);
    else if (slot.state === "free") unsay(this.#name);
    else say(this.#name, slot.yours ? "anotherSession" : "someoneElse");
    this.#showTokens({ prompt: slot.prompt_tokens, generated: slot.generated_tokens }, length);
  }

  #showTokens(tokens, length) {
    const all = tokens.prompt + tokens.generated;
    this.#bar.style.setProperty("--used", Math.min(1, all / length));
    for (const node of [this.#tokens, this.#tokensInWords]) node.hidden = all === 0;
    say(this.#tokens, "slotTokens", tokens);
    describe(this.#tokens, "tooltip", "slotTokensInWords", tokens);
    say(this.#tokensInWords, "slotTokensInWords", tokens);
  }
}
