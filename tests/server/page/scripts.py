"""What the tests of the page run inside the browser."""

from __future__ import annotations

CUT_EVERYWHERE = """
async ({ bytes, cuts }) => {
  const { eventsOf } = await import("/static/js/stream.js");
  const results = [];
  for (const cut of cuts) {
    const pieces = cut.map((end, at) => new Uint8Array(bytes.slice(at ? cut[at - 1] : 0, end)));
    const stream = new ReadableStream({
      start(controller) {
        pieces.forEach((piece) => controller.enqueue(piece));
        controller.close();
      },
    });
    const events = [];
    for await (const data of eventsOf(stream)) events.push(data);
    results.push(events);
  }
  return results;
}
"""
"""The events of a stream of bytes, once for each way of cutting it into pieces."""

LEAVE_EARLY = """
async () => {
  const { eventsOf } = await import("/static/js/stream.js");
  let seen;
  let cancelled = false;
  const bytes = new TextEncoder().encode("data: 1\\n\\ndata: 2\\n\\n");
  const stream = new ReadableStream({
    start: (controller) => controller.enqueue(bytes),
    cancel: () => { cancelled = true; },
  });
  for await (const data of eventsOf(stream)) {
    seen = data;
    break;
  }
  return [seen, cancelled];
}
"""

GROW = """
async () => {
  const { showMarkdown } = await import("/static/js/markdown.js");
  const node = document.createElement("div");
  showMarkdown(node, "first\\n\\nsec");
  const [first, second] = node.children;
  showMarkdown(node, "first\\n\\nsecond");
  return [node.children[0] === first, node.children[1] === second, node.children[1].textContent];
}
"""
"""Whether the first and the second paragraph are the old ones after the second has grown."""

COPY_AND_GROW = """
async () => {
  const { showMarkdown } = await import("/static/js/markdown.js");
  const node = document.createElement("div");
  document.body.append(node);
  showMarkdown(node, "```\\nx\\n```\\n\\nmo");
  const button = node.querySelector("button");
  button.focus();
  button.textContent = "Copied";
  showMarkdown(node, "```\\nx\\n```\\n\\nmore");
  const kept = node.querySelector("button") === button ? "kept" : "replaced";
  const { tagName } = document.activeElement;
  node.remove();
  return [tagName, kept];
}
"""
"""Which element has the focus, and whether a block whose button changed is kept."""

MARKDOWN = """
async (texts) => {
  const { showMarkdown } = await import("/static/js/markdown.js");
  return texts.map((text) => {
    const node = document.createElement("div");
    showMarkdown(node, text);
    return node.firstElementChild.innerHTML;
  });
}
"""
"""The first block of each of these texts, as HTML."""

CHARACTERS_READ = """
async (text) => {
  const { showMarkdown } = await import("/static/js/markdown.js");
  const replace = RegExp.prototype[Symbol.replace];
  let read = 0;
  RegExp.prototype[Symbol.replace] = function (line, ...rest) {
    read += line.length;
    return replace.call(this, line, ...rest);
  };
  showMarkdown(document.createElement("div"), text);
  RegExp.prototype[Symbol.replace] = replace;
  return read;
}
"""
"""How many characters regular expressions go through to replace something in this text."""

COUNT_LAYOUTS = """
() => {
  const { get } = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
  window.layouts = 0;
  Object.defineProperty(Element.prototype, "scrollHeight", {
    get() {
      window.layouts += 1;
      return get.call(this);
    },
  });
}
"""
"""Counts how often a height is asked for, which computes the layout."""

TEXTS = """
async () => {
  const { en } = await import("/static/js/texts_en.js");
  const { zh } = await import("/static/js/texts_zh.js");
  return [Object.keys(en).sort(), Object.keys(zh).sort()];
}
"""

LOW_CONTRAST = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const painted = (...colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const linear = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const backgrounds = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return node.parentElement ? [...backgrounds(node.parentElement), own] : [own];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = [];
  let seen = 0;
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const shown = node.checkVisibility({ visibilityProperty: true });
    if (!shown || !texts.currentNode.data.trim() || node.closest(".visually-hidden")) continue;
    const behind = backgrounds(node);
    const light = [painted(...behind), painted(...behind, getComputedStyle(node).color)]
      .map(luminance)
      .sort();
    const ratio = (light[1] + 0.05) / (light[0] + 0.05);
    seen += 1;
    if (ratio < 4.5) low.push([texts.currentNode.data.trim(), ratio]);
  }
  return [seen, low];
}
"""
"""How many texts can be seen, and those with less contrast than WCAG's level AA asks for."""

ANSWERS_BY_HAND = """
window.answers = [];
const realFetch = window.fetch;
window.fetch = (path, options) => {
  if (!String(path).endsWith("chat/completions")) return realFetch(path, options);
  let controller;
  const body = new ReadableStream({ start: (made) => { controller = made; } });
  options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
  const send = (data) => controller.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
  const choose = (choice) => send(JSON.stringify({ choices: [{ delta: {}, ...choice }] }));
  window.answers.push({
    write: (content) => choose({ delta: { content } }),
    end: () => { choose({ finish_reason: "stop" }); send("[DONE]"); controller.close(); },
  });
  return Promise.resolve(new Response(body));
};
"""
"""Before the page's own scripts: the test writes its answers piece by piece."""
