/** Formulas in LaTeX, shown as they are written: Markdown would take backslashes, asterisks and
 * underscores from them, and make lists of their lines. */

// Without another opening delimiter: what is never closed is not searched again and again.
const IN_LINE = /\\\((?:[^\\]|\\[^(])+?\\\)/;
const DISPLAYED = /\\\[(?:[^\\]|\\[^[])+?\\\]|\$\$[^$]+\$\$/;
// As in Pandoc, so that prices are none.
const BETWEEN_DOLLARS = /\$(?![\s$])[^$`\n]*(?<![\s$`\\])\$(?![\w$])/;
const KINDS = [IN_LINE, DISPLAYED, BETWEEN_DOLLARS].map(({ source }) => source);
const FORMULA = new RegExp(`^(?:${KINDS.join("|")})`);
const BLOCK = new RegExp(`^ {0,3}(${DISPLAYED.source})[ \\t]*(?:\\n|$)`);
const EMPTY_LINE = /\n[ \t]*\n/;

/** Extensions for Marked. */
export const formulas = [
  {
    name: "formula",
    level: "inline",
    start: (src) => src.search(/\\[([]|\$\$(?!\$)|\$(?![\s$])/),
    tokenizer(src) {
      const [raw] = FORMULA.exec(src) ?? [];
      return raw && { type: "formula", raw, text: raw };
    },
    renderer({ text }) {
      return `<span class="formula">${this.parser.renderer.text({ text })}</span>`;
    },
  },
  {
    name: "formulaBlock",
    level: "block",
    start(src) {
      const before = src.search(/\n {0,3}(?:\\\[|\$\$)/);
      return before < 0 ? before : before + 1;
    },
    tokenizer(src) {
      const [raw, text] = BLOCK.exec(src) ?? [];
      if (!raw || EMPTY_LINE.test(text)) return undefined;
      return { type: "formulaBlock", raw, tokens: [{ type: "formula", raw: text, text }] };
    },
    renderer({ tokens }) {
      return `<p>${this.parser.parseInline(tokens)}</p>\n`;
    },
  },
];
