/** Renders answers as Markdown. Model output is untrusted: a model can be made to repeat anything in
 * its prompt. */

import "../vendor/dompurify/purify.min.js";
import { Marked } from "../vendor/marked/marked.esm.js";
import { tokenizer } from "./cjk.js";
import { codeBlock } from "./code_block.js";
import { element } from "./dom.js";
import { formulas } from "./formulas.js";
import { lowerHeadings } from "./headings.js";
import { highlighted } from "./highlighting.js";
import { ADDRESS, literalSyntax } from "./literal_syntax.js";

const purifier = globalThis.DOMPurify(window);
const HARMLESS_TAG = /^<\/?(?:br|sub|sup|kbd)\s*\/?>$/i;
const TAGS =
  "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr kbd li ol p pre span strong sub sup" +
  " table tbody td th thead tr ul";
const RULES = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: ADDRESS,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  RETURN_DOM_FRAGMENT: true,
};

/** The HTML of each shown block as it was made: a copy button in it may say "Copied" by now. */
const sources = new WeakMap();

const parser = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: { ...tokenizer, ...literalSyntax },
  extensions: formulas,
  hooks: { processAllTokens: showUnusedDefinitions },
  renderer: {
    // Shown as source, so no word of an answer gets lost.
    html: ({ text, block }) => (HARMLESS_TAG.test(text.trim()) ? text : literal(text, block)),
    // Loading it would reveal to a third party that the answer is being read.
    image: ({ text, href }) => {
      const address = ADDRESS.test(href) ? ` title="${escaped(href)}"` : "";
      return `<span class="picture"${address}>${escaped(text || href)}</span>`;
    },
    code: ({ text, lang }) => {
      const language = /^\S*/.exec(lang ?? "")[0];
      const named = language && ` class="language-${escaped(language)}" title="${escaped(lang)}"`;
      return `<pre><code${named}>${highlighted(text, language) ?? escaped(text)}\n</code></pre>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const ELSEWHERE = { target: "_blank", rel: "noopener noreferrer" };

purifier.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  for (const [name, value] of Object.entries(ELSEWHERE)) node.setAttribute(name, value);
});

/**
 * Renders `markdown` into `node`. Replaces only changed blocks, so selected text in a growing
 * answer stays selected.
 */
export function showMarkdown(node, markdown) {
  const fresh = fragmentOf(markdown);
  const old = [...node.childNodes];
  const next = [...fresh.childNodes];
  let same = 0;
  for (const child of next) sources.set(child, child.outerHTML ?? child.data);
  const isSame = (place) => sources.get(old[place]) === sources.get(next[place]);
  while (same < old.length && same < next.length && isSame(same)) same += 1;
  const left = scrollerOf(old[same])?.scrollLeft;
  for (const child of old.slice(same)) child.remove();
  node.append(...next.slice(same));
  // A wide block that grows stays where its reader has scrolled.
  const scroller = scrollerOf(next[same]);
  if (left && scroller) scroller.scrollLeft = left;
}

function fragmentOf(markdown) {
  let html;
  try {
    html = parser.parse(markdown);
  } catch {
    // Absurdly deep nesting exhausts the parser's stack.
    html = `<p>${escaped(markdown)}</p>`;
  }
  const fragment = purifier.sanitize(html, RULES);
  lowerHeadings(fragment);
  for (const pre of fragment.querySelectorAll("pre")) codeBlock(pre);
  for (const node of fragment.querySelectorAll("table")) {
    // Wide tables scroll inside their frame, also by keyboard.
    const frame = element("div", { class: "scroll", tabindex: 0 });
    node.replaceWith(frame);
    frame.append(node);
  }
  for (const picture of fragment.querySelectorAll(".picture[title]")) {
    // There are no links in links.
    if (picture.closest("a")) continue;
    const link = element("a", { class: "picture", href: picture.title, ...ELSEWHERE });
    link.append(...picture.childNodes);
    picture.replaceWith(link);
  }
  for (const block of fragment.children) block.dir ||= "auto";
  return fragment;
}

/** The frame in which a code block or a table scrolls. */
function scrollerOf(block) {
  return block?.matches?.(".scroll") ? block : block?.querySelector?.(".scroll");
}

/** Nothing else shows the address of a definition that the answer does not refer to. */
function showUnusedDefinitions(tokens) {
  if (Object.keys(tokens.links).length === 0) return tokens;
  const used = new Set();
  parser.walkTokens(tokens, ({ type, href }) => used.add(type !== "def" && href));
  parser.walkTokens(tokens, (token) => {
    if (token.type !== "def" || used.has(token.href)) return;
    token.type = "paragraph";
    token.tokens = parser.Lexer.lexInline(token.raw.trim(), parser.defaults);
  });
  return tokens;
}

function literal(html, block) {
  const text = escaped(html);
  return block ? `<p>${text.trim().replaceAll("\n", "<br>")}</p>` : text;
}

function escaped(text) {
  const signs = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(/[&<>"]/g, (sign) => signs[sign]);
}
