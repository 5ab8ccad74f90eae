/** Syntax of Markdown that answers hardly ever mean: it would take words from them. */

import { Tokenizer } from "../vendor/marked/marked.esm.js";

export const ADDRESS = /^(?:https?|mailto):/i;
const CELLS = /(?<!\\)\|/;

/** Tokenizer extension for Marked, which asks its own tokenizer only where a result is false. */
export const literalSyntax = {
  /** All tags are shown as source, so none makes what follows it raw HTML. */
  tag(src) {
    const token = Tokenizer.prototype.tag.call(this, src);
    this.lexer.state.inRawBlock = false;
    return token;
  },

  /** Strikes out between two tildes only: Chinese writes ranges with one. */
  del(src, masked, before) {
    if (!src.startsWith("~~")) return undefined;
    return Tokenizer.prototype.del.call(this, src, masked, before);
  },

  /** `[Alice]: Hello` is no definition of a link. */
  def(src) {
    const token = Tokenizer.prototype.def.call(this, src);
    return ADDRESS.test(token?.href ?? "") ? token : undefined;
  },

  /** `handlers[i](event)` and `[config](config.json)` are no links: their addresses lead nowhere. */
  link(src) {
    const token = Tokenizer.prototype.link.call(this, src);
    return token?.type !== "link" || ADDRESS.test(token.href) ? token : undefined;
  },

  /** Rows with more cells than the header widen the table, which would drop them. */
  table(src) {
    const token = Tokenizer.prototype.table.call(this, src);
    if (!token) return token;
    const rows = token.raw.trimEnd().split("\n").slice(2);
    const most = Math.max(0, ...rows.map(cellsOf));
    const more = most - token.header.length;
    if (more <= 0) return token;
    const [head, rule] = src.split("\n", 2).map((line) => line.trimEnd().replace(/\|?$/, "|"));
    const wider = [head + " |".repeat(more), `${rule}${" - |".repeat(more)}`, ...rows].join("\n");
    return { ...Tokenizer.prototype.table.call(this, wider), raw: token.raw };
  },
};

function cellsOf(row) {
  return row.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(CELLS).length;
}
