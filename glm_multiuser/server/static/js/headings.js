/** Heading levels of an answer: below the page's own headings, without skipping a level. */

import { element } from "./dom.js";

// Level of "You" and "Answer".
const ABOVE = 3;
const LOWEST = 6;

export function lowerHeadings(fragment) {
  const headings = [...fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")];
  const levels = [...new Set(headings.map(({ localName }) => localName))].sort();
  let last = ABOVE;
  for (const heading of headings) {
    const place = ABOVE + 1 + levels.indexOf(heading.localName);
    last = Math.min(place, last + 1, LOWEST);
    const lower = element(`h${last}`);
    lower.append(...heading.childNodes);
    heading.replaceWith(lower);
  }
}
