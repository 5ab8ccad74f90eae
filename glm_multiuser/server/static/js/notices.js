/** Short notices of the page, each shown once until dismissed. */

import { element, iconButton } from "./dom.js";
import { say } from "./i18n.js";

/** Shows a text by key; a visible notice is not shown twice. */
export function notify(name) {
  const place = document.querySelector("#notices");
  if (place.querySelector(`[data-text="${name}"]`)) return;
  const notice = element("div", { class: "notice" }, say(element("p"), name));
  notice.append(iconButton("close", "dismiss", () => notice.remove()));
  place.append(notice);
}
