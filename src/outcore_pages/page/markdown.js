// Markdown as elements. What a model writes is data: HTML in it is shown as text (markdown-it's html: false), what
// markdown-it makes is cleaned once more (DOMPurify), and the policy of the page runs no script of an element.

const md = window.markdownit({html: false, linkify: true, breaks: true}).disable("image");
md.linkify.set({fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false});
// Code without a fence is a paragraph: its lines keep what they are indented by.
md.inline.ruler.before("newline", "indented", (state, silent) => {
  const found = /^\n( {2,}|\t[ \t]*)(?=\S)/.exec(state.src.slice(state.pos, state.pos + 200));
  if (!found) return false;
  if (!silent) {
    state.pending = state.pending.replace(/ +$/, "");
    state.push("hardbreak", "br", 0);
    state.push("html_inline", "", 0).content = `<span class="indent">${found[1]}</span>`;
  }
  state.pos += found[0].length;
  return true;
});
const CLEAN = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["class", "href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const clean = html => window.DOMPurify.sanitize(html, CLEAN);

// An answer that grows. Blocks that did not change keep their elements, and all but the last two blocks are not read
// again, so that a token costs the same in a long answer. The last call, with done, reads everything.
export class Rendered {
  constructor(element) {
    this.element = element;
    this.keys = [];
    this.settled = 0;  // blocks
    this.from = 0;  // where the text after them begins
  }
  show(text, done) {
    text = text.replace(/\r\n?/g, "\n");
    if (done) this.settled = this.from = 0;
    const rest = text.slice(this.from), blocks = blocksOf(rest);
    blocks.forEach((block, i) => {
      const at = this.settled + i, coloured = done || i < blocks.length - 1;
      const key = block.html + (coloured && block.html.startsWith("<pre>") ? "c" : "");
      if (this.keys[at] === key) return;
      this.keys[at] = key;
      const made = document.createElement("div");
      made.append(clean(block.html));
      for (const pre of made.querySelectorAll("pre")) codeBox(pre, coloured);
      for (const link of made.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
      const old = this.element.children[at];
      if (old) old.replaceWith(made); else this.element.append(made);
    });
    this.keys.length = this.settled + blocks.length;
    while (this.element.children.length > this.keys.length) this.element.lastChild.remove();
    if (!done && blocks.length > 2) {
      this.settled += blocks.length - 2;
      this.from += beginOf(rest, blocks[blocks.length - 2].line);
    }
  }
}
function blocksOf(text) {
  const env = {}, blocks = [];
  let group = [], depth = 0;
  for (const token of md.parse(text, env)) {
    // Columns of tables: the policy allows no style.
    const style = token.attrGet("style");
    if (style) token.attrs = [["class", style.replace("text-align:", "")]];
    group.push(token);
    depth += token.nesting;
    if (depth) continue;
    blocks.push({html: md.renderer.render(group, md.options, env).trimEnd(), line: group[0].map?.[0] ?? 0});
    group = [];
  }
  return blocks;
}
function beginOf(text, line) {
  let at = 0;
  while (line--) at = text.indexOf("\n", at) + 1;
  return at;
}

function codeBox(pre, coloured) {
  const code = pre.firstElementChild, language = /language-(\S+)/.exec(code.className)?.[1] || "";
  const box = document.createElement("div"), head = document.createElement("div"), name = document.createElement("span");
  box.className = "code";
  name.textContent = language;
  head.append(name, copyButton(() => code.textContent));
  pre.replaceWith(box);
  box.append(head, pre);
  pre.tabIndex = 0;  // scrolls by keyboard
  if (coloured && window.hljs.getLanguage(language)) {
    code.replaceChildren(clean(window.hljs.highlight(code.textContent, {language, ignoreIllegals: true}).value));
  }
}

export function button(text, action, name = text) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (name !== text) made.setAttribute("aria-label", name);
  made.addEventListener("click", action);
  return made;
}
export function copyButton(text) {
  const made = button("Copy", async () => {
    made.textContent = await copied(text()) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages of another machine, without TLS, have no clipboard but this one.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
