/** Emphasis next to Chinese, Japanese and Korean text, which has no spaces around punctuation.
 *
 * CommonMark leaves the asterisks in `**注意：**请看`: a delimiter between punctuation and a letter
 * can only open. Here CJK punctuation, and punctuation across a delimiter from CJK, count as letters:
 * https://github.com/tats-u/markdown-cjk-friendly/blob/main/specification.md */

import { Tokenizer } from "../vendor/marked/marked.esm.js";

const CJK =
  "[\\p{scx=Han}\\p{scx=Hiragana}\\p{scx=Katakana}\\p{scx=Hangul}\\u3000-\\u303f\\uff01-\\uffee]";
const SIGN = "(?![*_~`\\\\])[\\p{P}\\p{S}]";
const SIGNS = new RegExp(`(?=${CJK})${SIGN}|${SIGN}(?=\\*+${CJK})|(?<=${CJK}\\*+)${SIGN}`, "gu");
const BESIDE_CJK = new RegExp(`^(?:${CJK}|\\*+${CJK})`, "u");
const END_OF_ADDRESS = /(?=[\u3000-\u303f\uff01-\uffee“”])\p{P}/u;

let lastLine = "";
let lastLetters = "";

/** The line with such punctuation as letters. Cached: Marked asks at each delimiter of a line. */
function lettersOf(line) {
  if (line === lastLine) return lastLetters;
  lastLine = line;
  lastLetters = line.replace(SIGNS, (sign) => "a".repeat(sign.length));
  return lastLetters;
}

/** Tokenizer extension for Marked. */
export const tokenizer = {
  /** @param masked the whole line, searched for delimiters; `src` is the rest of it. */
  emStrong(src, masked, before = "") {
    if (!src.startsWith("*")) return false;
    const letters = lettersOf(masked);
    const opens = before !== "*" && [before, src].some((text) => BESIDE_CJK.test(text));
    return Tokenizer.prototype.emStrong.call(this, src, letters, opens ? "" : before);
  },

  /** Ends a bare URL before full-width punctuation. */
  url(src) {
    return Tokenizer.prototype.url.call(this, src.split(END_OF_ADDRESS, 1)[0]);
  },
};
