// A small part of Markdown, made into nodes. Text stays text: no HTML of the model is ever parsed.

const INLINE = new RegExp([
  "(?<code>`+)(?<codeText>.+?)\\k<code>(?!`)",
  "\\*\\*(?<strong>\\S(?:.*?\\S)?)\\*\\*",
  "(?<![\\w*])\\*(?<em>[^\\s*](?:[^*]*[^\\s*])?)\\*(?!\\w)",
  "(?<!\\w)_(?<em2>[^\\s_](?:[^_]*[^\\s_])?)_(?!\\w)",
  "~~(?<del>\\S(?:.*?\\S)?)~~",
  "\\[(?<label>[^\\]\\n]+)\\]\\((?<href>[^\\s()]+)\\)",
  "(?<url>https?://[^\\s<>()]+[^\\s<>().,;:!?'\"])",
].join("|"), "s");

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const DEEPEST = 8;

function make(tag, children = [], className = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function inline(text, depth = 0) {
  const nodes = [];
  for (let rest = text; rest;) {
    const found = depth < DEEPEST ? INLINE.exec(rest) : null;
    if (!found) {
      nodes.push(rest);
      break;
    }
    if (found.index) nodes.push(rest.slice(0, found.index));
    nodes.push(marked(found, depth + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes.flatMap((node) => (typeof node === "string" ? broken(node) : [node]));
}

// Two spaces at the end of a line break it.
function broken(text) {
  const lines = text.split(/ {2,}\n/);
  return lines.flatMap((line, i) => (i ? [make("br"), line] : [line]));
}

function marked(found, depth) {
  const { codeText, strong, em, em2, del, label, href, url } = found.groups;
  if (codeText !== undefined) return make("code", [codeText]);
  if (strong !== undefined) return make("strong", inline(strong, depth));
  if (em !== undefined || em2 !== undefined) return make("em", inline(em ?? em2, depth));
  if (del !== undefined) return make("del", inline(del, depth));
  return link(href ?? url, label === undefined ? [url] : inline(label, DEEPEST), found[0]);
}

function link(href, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return whole;
  const node = make("a", children);
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function codeBlock(language, lines) {
  const text = lines.join("\n");
  const copy = make("button", ["Copy"], "quiet");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const head = make("header", [make("span", [language || "text"]), copy]);
  const pre = make("pre", [make("code", [text])]);
  pre.tabIndex = 0;
  return make("div", [head, pre], "code");
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) node.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^ {1,4}|^\t/, ""));
  }
  for (const item of items) node.append(make("li", blocks(item, depth + 1, true)));
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());
  const row = (line, tag) => make("tr", cells(line).map((cell) => make(tag, inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const node = make("table", [make("thead", [row(lines[0], "th")]), make("tbody", body)]);
  return make("div", [node], "table");
}

function blocks(lines, depth = 0, tight = false) {
  const nodes = [];
  let at = 0;
  const take = (while_) => {
    const start = at;
    while (at < lines.length && while_(lines[at], at - start)) at += 1;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^ {0,3}(#{1,6})\s+(.*?)#*\s*$/.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      at += 1;
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      const code = take((other) => !end.test(other));
      at += 1;
      nodes.push(codeBlock(fence[2], code));
    } else if (heading) {
      at += 1;
      nodes.push(make(`h${Math.min(5, heading[1].length + 2)}`, inline(heading[2])));
    } else if (/^ {0,3}([-*_])( *\1){2,}\s*$/.test(line)) {
      at += 1;
      nodes.push(make("hr"));
    } else if (depth < DEEPEST && /^ {0,3}>/.test(line)) {
      const quoted = take((other) => /^ {0,3}>/.test(other));
      const inner = blocks(quoted.map((l) => l.replace(/^ {0,3}> ?/, "")), depth + 1);
      nodes.push(make("blockquote", inner));
    } else if (depth < DEEPEST && ITEM.test(line)) {
      nodes.push(list(take((other, i) => !i || ITEM.test(other) || /^(\s{2,}|\t)\S/.test(other)), depth));
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      nodes.push(table(take((other) => other.includes("|"))));
    } else {
      const text = take((other, i) => !i || (other.trim() && !FENCE.test(other) && !/^ {0,3}(#{1,6}\s|>)/.test(other) && !ITEM.test(other)));
      const content = inline(text.join("\n"));
      if (tight && !nodes.length) nodes.push(...content);
      else nodes.push(make("p", content));
    }
  }
  return nodes;
}

// The nodes of a text. What a model thinks before it answers is folded away.
export function render(text) {
  const thought = /^\s*<think>(.*?)(<\/think>|$)/s.exec(text);
  if (!thought) return blocks(text.split("\n"));
  const details = make("details", [make("summary", ["Thoughts"]), ...blocks(thought[1].split("\n"))]);
  return [details, ...blocks(text.slice(thought[0].length).split("\n"))];
}
