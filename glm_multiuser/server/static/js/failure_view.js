/** The error block of a failed answer, with advice. */

import { element, icon, textButton } from "./dom.js";
import { phrase, say } from "./i18n.js";

const COUNTED_DOWN = ["full", "busy", "unavailable"];

/** The failure as one sentence, for screen readers. */
export function titleOf({ kind }) {
  return phrase(`failure_${kind}`);
}

/** `onAgain` asks the same question again. */
export function failureView(failure, onAgain) {
  const title = element("p", { class: "failure-title" });
  const detail = element("p", { class: "failure-detail" }, failure.detail);
  const actions = element("div", { class: "failure-actions" }, textButton("tryAgain", onAgain));
  if (failure.kind === "key") actions.append(textButton("openSettings", askForSettings));
  const node = element("div", { class: "failure" }, icon("alert"), title);
  if (failure.detail) node.append(detail);
  node.append(actions);
  showTitle(title, failure);
  return node;
}

function askForSettings(event) {
  event.target.dispatchEvent(new Event("open-settings", { bubbles: true }));
}

function showTitle(title, { kind, retryAt }) {
  const seconds = Math.ceil(((retryAt ?? 0) - Date.now()) / 1000);
  if (!COUNTED_DOWN.includes(kind) || seconds <= 0) {
    say(title, `failure_${kind}`);
    return;
  }
  say(title, `failure_${kind}For`, { seconds });
  setTimeout(() => {
    if (title.isConnected) showTitle(title, { kind, retryAt });
  }, 1000);
}
