/** The page's texts in the chosen language. Nodes remember which text they show, so a change of
 * the language reaches all of them without building the page anew. */

import { en } from "./texts_en.js";
import { zh } from "./texts_zh.js";
import { settings } from "./settings.js";

const TEXTS = { en, zh };
const LOCALES = { en: "en", zh: "zh-CN" };
const ATTRIBUTES = {
  label: ["aria-label"],
  tooltip: ["title"],
  hint: ["aria-label", "title"],
  placeholder: ["placeholder"],
};
const valuesOf = new WeakMap();

/** The text of that name; where it has places for values, with `values` in them. */
export function phrase(name, values = {}) {
  const text = TEXTS[settings.language][name];
  return typeof text === "function" ? text(values) : text;
}

/** A number the way the language writes it. */
export function number(value, digits = 0) {
  return value.toLocaleString(LOCALES[settings.language], { maximumFractionDigits: digits });
}

/** Shows a text in `node`, and keeps it in the chosen language. Returns the node. */
export function say(node, name, values) {
  return show(node, "text", name, values);
}

/** Shows no text there any more. */
export function unsay(node) {
  delete node.dataset.text;
  node.textContent = "";
}

/** The same as `say` for a label, a tooltip, a hint (a label that is also a tooltip) or a placeholder. */
export function describe(node, kind, name, values) {
  return show(node, kind, name, values);
}

/** Puts every text of the document into the chosen language. */
export function translate() {
  document.documentElement.lang = LOCALES[settings.language];
  for (const kind of ["text", ...Object.keys(ATTRIBUTES)]) {
    for (const node of document.querySelectorAll(`[data-${kind}]`)) fill(node, kind);
  }
}

function show(node, kind, name, values) {
  node.dataset[kind] = name;
  valuesOf.set(node, { ...valuesOf.get(node), [kind]: values });
  fill(node, kind);
  return node;
}

function fill(node, kind) {
  const text = phrase(node.dataset[kind], valuesOf.get(node)?.[kind]);
  if (kind === "text") {
    if (node.textContent !== text) node.textContent = text;
    return;
  }
  for (const attribute of ATTRIBUTES[kind]) node.setAttribute(attribute, text);
}
