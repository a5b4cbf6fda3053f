// Markdown as elements of the page: made one by one, with text as text.
import { blocks, inline } from "./markdown.js";

const TAGS = { strong: "strong", emphasis: "em", strike: "s", code: "code" };

export function element(tag, name, ...inside) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...inside);
  return made;
}

// Copies a text; the clipboard's interface is not there for pages of plain HTTP on other hosts.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement, field = element("textarea", "outside");
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    before?.focus();
    return copied;
  }
}

export function copyButton(text, label) {
  const button = element("button", "plain", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = await copy(text()) ? "Copied" : "Select and copy it by hand";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// A text that grows, in `place`. `passes` is a list of [end, tokens, milliseconds]: where in the
// text each pass's words end. Only blocks that differ are made anew.
export class Text {
  constructor(place) {
    this.place = place;
    this.made = [];
  }

  show(source, passes = []) {
    this.source = source;
    this.passes = passes;
    const found = blocks(source);
    found.forEach((block, i) => {
      const key = `${block.kind} ${block.from} ${source.slice(block.from, block.to)}`;
      const before = this.made[i];
      if (before?.key === key) return;
      const made = { key, node: this.block(block) };
      if (before) before.node.replaceWith(made.node); else this.place.append(made.node);
      this.made[i] = made;
    });
    for (const { node } of this.made.splice(found.length)) node.remove();
  }

  block(block) {
    switch (block.kind) {
      case "heading": return this.fill(element(`h${Math.min(6, block.level + 2)}`), block.text);
      case "rule": return element("hr");
      case "code": return this.code(block);
      case "quote": return element("blockquote", "", ...block.blocks.map((one) => this.block(one)));
      case "list": return this.list(block);
      case "table": return this.table(block);
      default: return this.fill(element("p"), block.text);
    }
  }

  code(block) {
    const code = element("code");
    block.text.forEach((piece, i) => {
      if (i) code.append("\n");
      this.texts(code, [piece]);
    });
    const text = () => block.text.map(([from, to]) => this.source.slice(from, to)).join("\n");
    const pre = element("pre", "", code);
    pre.tabIndex = 0;
    const head = element("div", "head", element("span", "", block.language || "text"), copyButton(text, "Copy this code"));
    return element("div", "code", head, pre);
  }

  list({ ordered, start, items }) {
    const list = element(ordered ? "ol" : "ul");
    if (ordered && start !== 1) list.start = start;
    for (const inside of items) {
      const item = element("li");
      // The text of a short item stands in it, without a paragraph.
      for (const one of inside) {
        if (one.kind === "paragraph" && one === inside[0]) this.fill(item, one.text);
        else item.append(this.block(one));
      }
      list.append(item);
    }
    return list;
  }

  table({ align, rows }) {
    const table = element("table");
    rows.forEach((cells, i) => {
      const row = element("tr");
      align.forEach((side, column) => {
        const cell = element(i ? "td" : "th", side);
        if (!i) cell.scope = "col";
        if (cells[column]) this.fill(cell, [cells[column]]);
        row.append(cell);
      });
      (i ? table.tBodies[0] ?? table.createTBody() : table.createTHead()).append(row);
    });
    const scroll = element("div", "wide", table);
    scroll.tabIndex = 0;
    return scroll;
  }

  fill(parent, pieces) {
    this.nodes(parent, inline(this.source, pieces));
    return parent;
  }

  nodes(parent, nodes) {
    for (const node of nodes) {
      if (node.kind === "text") this.texts(parent, node.pieces);
      else {
        const made = element(TAGS[node.kind] ?? "a");
        if (node.kind === "link") {
          made.href = node.href;
          made.target = "_blank";
          made.rel = "noopener noreferrer nofollow";
        }
        this.nodes(made, node.inside);
        parent.append(made);
      }
    }
  }

  // Pieces of the source as text, cut where a pass ends.
  texts(parent, pieces) {
    const { passes } = this;
    for (const [from, to] of pieces) {
      let at = from, pass = firstAfter(passes, from);
      while (at < to) {
        const end = Math.min(to, passes[pass]?.[0] ?? to), text = this.source.slice(at, end);
        if (pass < passes.length) {
          const span = element("span", passName(passes[pass], pass), text);
          span.dataset.pass = pass;
          parent.append(span);
        } else parent.append(text);
        at = end;
        pass += 1;
      }
    }
  }
}

const passName = ([, tokens], pass) => `pass${tokens > 1 ? ` many tint${pass % 2}` : ""}`;

// The first pass that ends behind a place of the text.
function firstAfter(passes, place) {
  let low = 0, high = passes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passes[middle][0] > place) high = middle; else low = middle + 1;
  }
  return low;
}
