/** Helpers that create nodes. */

import { describe, say } from "./i18n.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; attributes that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** An icon from the symbols in index.html. */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", "aria-hidden": "true" },
    svg("use", { href: `#icon-${name}` }),
  );
}

/** An icon-only button; its hint is also its accessible name. */
export function iconButton(name, hint, onClick) {
  const button = element("button", { type: "button", class: "icon-button" }, icon(name));
  button.addEventListener("click", onClick);
  return describe(button, "hint", hint);
}

export function textButton(name, onClick, className = "button") {
  const button = element("button", { type: "button", class: className });
  button.addEventListener("click", onClick);
  return say(button, name);
}

function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
}
