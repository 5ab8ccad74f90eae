/** A small chart of the last minute. The caller adds the label. */

import { svg } from "./dom.js";

const SECONDS = 60;
const HEIGHT = 40;
const LOWEST_TOP = 10;

export class Chart {
  #area = svg("path", { class: "chart-area" });
  #line = svg("path", { class: "chart-line" });

  constructor() {
    const view = `0 0 ${SECONDS - 1} ${HEIGHT}`;
    const attributes = { class: "chart", viewBox: view, preserveAspectRatio: "none" };
    this.node = svg("svg", attributes, this.#area, this.#line);
  }

  /** Draws up to 60 values, the newest at the right. Returns the value at the upper edge. */
  draw(values) {
    // Not earlier: an image without a label is an accessibility error.
    this.node.setAttribute("role", "img");
    const top = roundUp(Math.max(LOWEST_TOP, ...values));
    const first = SECONDS - values.length;
    const points = values.map((value, at) => `${first + at} ${HEIGHT * (1 - value / top)}`);
    const line = points.length > 0 ? `M${points.join("L")}` : "";
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", line && `${line}V${HEIGHT}H${first}Z`);
    return top;
  }
}

/** Rounds up to 1, 2 or 5 times a power of ten, so the scale rarely changes. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
