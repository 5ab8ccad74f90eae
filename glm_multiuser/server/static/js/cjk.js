/** Markdown beside Chinese, Japanese and Korean, which have no spaces around words and signs.
 *
 * CommonMark would show the asterisks of `**注意：**请看`: a delimiter between a sign and a letter is
 * one that opens. Here CJK characters count as letters, and signs beside their delimiters, too, as
 * https://github.com/tats-u/markdown-cjk-friendly/blob/main/specification.md has it. */

import { Tokenizer } from "../vendor/marked/marked.esm.js";

const CJK =
  "[\\p{scx=Han}\\p{scx=Hiragana}\\p{scx=Katakana}\\p{scx=Hangul}\\u3000-\\u303f\\uff01-\\uffee]";
const SIGN = "(?![*_~`\\\\])[\\p{P}\\p{S}]";
const SIGNS = new RegExp(`(?=${CJK})${SIGN}|${SIGN}(?=\\*+${CJK})|(?<=${CJK}\\*+)${SIGN}`, "gu");
const BESIDE_CJK = new RegExp(`^(?:${CJK}|\\*+${CJK})`, "u");
const END_OF_ADDRESS = /(?=[\u3000-\u303f\uff01-\uffee“”])\p{P}/u;

let lastLine = "";
let lastLetters = "";

/** The line with its signs beside CJK as letters. Marked asks at each delimiter of the same line. */
function lettersOf(line) {
  if (line === lastLine) return lastLetters;
  lastLine = line;
  lastLetters = line.replace(SIGNS, (sign) => "a".repeat(sign.length));
  return lastLetters;
}

/** For Marked. */
export const tokenizer = {
  /** @param masked the whole line, in which delimiters are looked for; `src` is the rest of it. */
  emStrong(src, masked, before = "") {
    if (!src.startsWith("*")) return false;
    const letters = lettersOf(masked);
    const opens = before !== "*" && [before, src].some((text) => BESIDE_CJK.test(text));
    return Tokenizer.prototype.emStrong.call(this, src, letters, opens ? "" : before);
  },

  /** A bare address ends before a full-width sign. */
  url(src) {
    return Tokenizer.prototype.url.call(this, src.split(END_OF_ADDRESS, 1)[0]);
  },
};
