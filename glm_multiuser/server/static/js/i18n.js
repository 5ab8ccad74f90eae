/** The page's texts in the chosen language. Nodes remember their text key, so the language can
 * change without rebuilding the page. */

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

/** Returns a text by key, with `values` in its placeholders. */
export function phrase(name, values = {}) {
  const text = TEXTS[settings.language][name];
  return typeof text === "function" ? text(values) : text;
}

/** Formats a number for the language. */
export function number(value, digits = 0) {
  return value.toLocaleString(LOCALES[settings.language], { maximumFractionDigits: digits });
}

/** Shows a text in `node` and translates it when the language changes. Returns the node. */
export function say(node, name, values) {
  return show(node, "text", name, values);
}

/** Removes the text. */
export function unsay(node) {
  delete node.dataset.text;
  node.textContent = "";
}

/** Like `say`, for a label, a tooltip, a hint (both label and tooltip) or a placeholder. */
export function describe(node, kind, name, values) {
  return show(node, kind, name, values);
}

/** Translates all texts of the document. */
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
