/** Headings of an answer: they stand below those of the page, and none skips a level. */

import { element } from "./dom.js";

// "You" and "Answer" are of this level.
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
