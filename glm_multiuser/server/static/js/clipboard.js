/** Copying to the clipboard, also over plain http, where navigator.clipboard is missing. */

import { element } from "./dom.js";

/** Returns whether the text was copied. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyTheOldWay(text);
  }
}

function copyTheOldWay(text) {
  const before = document.activeElement;
  const carrier = element("textarea", { class: "visually-hidden" });
  carrier.value = text;
  document.body.append(carrier);
  carrier.select();
  const copied = document.execCommand("copy");
  carrier.remove();
  before?.focus();
  return copied;
}
