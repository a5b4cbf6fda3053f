// Markdown as models write it, parsed into a tree whose texts know where they stand in the source.
// Nothing here makes HTML: what is no markup stays text, so that no answer can run in the page.

const DEEPEST = 12;
const LONGEST_LINK = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const CELLS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const ESCAPED = /[!-/:-@[-`{-~]/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]+/;
const SAFE = /^(?:https?:\/\/|mailto:)/i;

// The blocks of a text. Every block has `kind`, and `from` and `to` in the source; a text in it is
// a list of pieces [from, to] of the source.
export function blocks(source) {
  return parse(source, lines(source), 0);
}

function lines(source) {
  const found = [];
  for (let from = 0; from < source.length;) {
    const end = source.indexOf("\n", from), to = end < 0 ? source.length : end;
    found.push({ from, to });
    from = to + 1;
  }
  return found;
}

function parse(source, given, depth) {
  const found = [], text = (line) => source.slice(line.from, line.to);
  let at = 0;
  const add = (kind, count, rest) => {
    found.push({ kind, from: given[at].from, to: given[at + count - 1].to, ...rest });
    at += count;
  };
  while (at < given.length) {
    const line = text(given[at]);
    let match;
    if (!line.trim()) at += 1;
    else if ((match = FENCE.exec(line))) add(...fence(source, given, at, match));
    else if ((match = HEADING.exec(line))) {
      add("heading", 1, { level: match[1].length, text: [cut(source, given[at], match[0].length)] });
    } else if (RULE.test(line)) add("rule", 1, {});
    else if (depth < DEEPEST && QUOTE.test(line)) add(...quote(source, given, at, depth));
    else if (depth < DEEPEST && ITEM.test(line)) add(...list(source, given, at, depth));
    else if (isTable(source, given, at)) add(...table(source, given, at));
    else {
      let count = 1;
      while (given[at + count] && !starts(source, given, at + count)) count += 1;
      add("paragraph", count, { text: given.slice(at, at + count).map(({ from, to }) => [from, to]) });
    }
  }
  return found;
}

// Whether a line ends the paragraph before it.
function starts(source, given, at) {
  const line = source.slice(given[at].from, given[at].to);
  return !line.trim() || [FENCE, HEADING, RULE, QUOTE].some((form) => form.test(line))
    || /^ {0,3}(?:[-*+]|1[.)])[ \t]+\S/.test(line) || isTable(source, given, at);
}

const cut = (source, { from, to }, count) => {
  let start = Math.min(to, from + count), end = to;
  while (end > start && /[ \t#]/.test(source[end - 1])) end -= 1;
  return [start, end];
};

function fence(source, given, at, [, mark, about]) {
  const indent = source.slice(given[at].from).search(/[^ ]/);
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  const text = [];
  let count = 1, closed = false;
  while (given[at + count] && !closed) {
    const { from, to } = given[at + count];
    count += 1;
    closed = close.test(source.slice(from, to));
    const spaces = source.slice(from, Math.min(to, from + indent)).search(/[^ ]|$/);
    if (!closed) text.push([from + spaces, to]);
  }
  return ["code", count, { language: about.trim().split(/\s+/)[0], text }];
}

function quote(source, given, at, depth) {
  const inner = [];
  let count = 0;
  while (given[at + count]) {
    const { from, to } = given[at + count], match = QUOTE.exec(source.slice(from, to));
    // A line without the mark may go on with the paragraph.
    if (!match && starts(source, given, at + count)) break;
    inner.push({ from: from + (match ? match[0].length : 0), to });
    count += 1;
  }
  return ["quote", count, { blocks: parse(source, inner, depth + 1) }];
}

function list(source, given, at, depth) {
  const first = ITEM.exec(source.slice(given[at].from, given[at].to));
  const ordered = /\d/.test(first[2]), sign = first[2].at(-1), items = [];
  let count = 0, blank = false;
  while (given[at + count]) {
    const { from, to } = given[at + count], line = source.slice(from, to), match = ITEM.exec(line);
    const indent = line.search(/[^ ]|$/);
    const belongs = items.length > 0 && indent >= 2;
    if (!line.trim()) blank = true;
    else if (match && !RULE.test(line) && match[2].at(-1) === sign && !(belongs && indent >= items.at(-1).indent)) {
      const start = from + Math.min(match[0].length, match[1].length + match[2].length + 1);
      items.push({ indent: match[1].length + 2, lines: [{ from: Math.min(start, to), to }] });
      blank = false;
      count += 1;
      continue;
    } else if (belongs) {
      const item = items.at(-1), most = item.lines[0].from - lineStart(source, item.lines[0].from);
      items.at(-1).lines.push({ from: from + Math.min(indent, most), to });
      blank = false;
      count += 1;
      continue;
    } else if (blank || starts(source, given, at + count)) break;
    if (items.length) items.at(-1).lines.push({ from, to });
    count += 1;
  }
  while (!source.slice(given[at + count - 1].from, given[at + count - 1].to).trim()) count -= 1;
  const made = items.map((item) => parse(source, item.lines, depth + 1));
  return ["list", count, { ordered, start: ordered ? Number.parseInt(first[2], 10) : 0, items: made }];
}

const lineStart = (source, at) => source.lastIndexOf("\n", at - 1) + 1;

function isTable(source, given, at) {
  if (!given[at + 1]) return false;
  const head = source.slice(given[at].from, given[at].to);
  const rule = source.slice(given[at + 1].from, given[at + 1].to);
  return head.includes("|") && rule.includes("-") && CELLS.test(rule)
    && cells(source, given[at]).length === cells(source, given[at + 1]).length;
}

function table(source, given, at) {
  const align = cells(source, given[at + 1]).map(([from, to]) => {
    const [left, right] = [source[from] === ":", source[to - 1] === ":"];
    return right ? (left ? "center" : "right") : "left";
  });
  const rows = [cells(source, given[at])];
  let count = 2;
  while (given[at + count] && source.slice(given[at + count].from, given[at + count].to).includes("|")) {
    const row = cells(source, given[at + count]), rest = row.splice(align.length);
    // What is too much for the columns stands in the last one.
    if (rest.length) row.at(-1)[1] = rest.at(-1)[1];
    rows.push(row);
    count += 1;
  }
  return ["table", count, { align, rows }];
}

function cells(source, { from, to }) {
  const found = [];
  let start = from, code = false;
  for (let i = from; i <= to; i++) {
    if (source[i] === "`") code = !code;
    if (i < to && (source[i] !== "|" || code || source[i - 1] === "\\")) continue;
    let [a, b] = [start, i];
    while (a < b && /\s/.test(source[a])) a += 1;
    while (b > a && /\s/.test(source[b - 1])) b -= 1;
    // The bars at both ends of a row are no borders of a cell.
    const outside = a === b && (start === from || i === to);
    if (!outside) found.push([a, b]);
    start = i + 1;
  }
  return found;
}

// The inline markup of a block's text: a list of {kind: "text", pieces} and of {kind, inside} for
// strong, emphasis, strike, code and link (`href`). Lines end in a line break.
export function inline(source, pieces) {
  const starts = [];
  let text = "";
  for (const [from, to] of pieces) {
    if (text) text += "\n";
    starts.push({ at: text.length, from });
    text += source.slice(from, to);
  }
  return new Inline(text, starts).parse(0, text.length, 0);
}

class Inline {
  constructor(text, starts) {
    this.text = text;
    this.starts = starts;
  }

  // [from, to] of the source for a part of the text; line breaks belong to the line before.
  pieces(from, to) {
    const found = [];
    this.starts.forEach(({ at, from: source }, i) => {
      const end = this.starts[i + 1]?.at ?? Infinity;
      const [a, b] = [Math.max(from, at), Math.min(to, end)];
      if (a < b) found.push([source + a - at, source + b - at]);
    });
    return found;
  }

  parse(from, to, depth) {
    const { text } = this, found = [], lacking = new Set();
    let plain = from, at = from;
    const flush = (end) => {
      if (end > plain) found.push({ kind: "text", pieces: this.pieces(plain, end) });
    };
    while (at < to) {
      const sign = text[at];
      if (sign === "\\" && at + 1 < to && ESCAPED.test(text[at + 1])) {
        flush(at);
        plain = at + 1;
        at += 2;
        continue;
      }
      const one = depth < DEEPEST ? this.markup(at, from, to, depth, lacking) : null;
      if (one) {
        flush(at);
        found.push(...one.nodes);
        plain = at = one.end;
      } else at += /[`*_~]/.test(sign) ? this.run(at, to) : 1;
    }
    flush(to);
    return found;
  }

  run(at, to) {
    let end = at;
    while (end < to && this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  markup(at, from, to, depth, lacking) {
    switch (this.text[at]) {
      case "`": return this.code(at, to, lacking);
      case "*": case "_": case "~": return this.emphasis(at, from, to, depth, lacking);
      case "!": return this.text[at + 1] === "[" ? this.link(at + 1, to, depth) : null;
      case "[": return this.link(at, to, depth);
      case "h": return this.address(at, from, to);
      default: return null;
    }
  }

  code(at, to, lacking) {
    const count = this.run(at, to), key = `\`${count}`;
    if (lacking.has(key)) return null;
    for (let end = at + count; end < to;) {
      const next = this.text.indexOf("`", end);
      if (next < 0 || next >= to) break;
      const length = this.run(next, to);
      if (length === count) {
        return { end: next + count, nodes: [{ kind: "code", inside: [{ kind: "text", pieces: this.pieces(at + count, next) }] }] };
      }
      end = next + length;
    }
    lacking.add(key);
    return null;
  }

  emphasis(at, from, to, depth, lacking) {
    const { text } = this, sign = text[at], count = this.run(at, to), inside = at + count;
    if (count > 3 || (sign === "~" && count !== 2) || inside >= to || /\s/.test(text[inside])) return null;
    const word = (i) => i >= from && i < to && /[\p{L}\p{N}_]/u.test(text[i]);
    if (sign === "_" && word(at - 1)) return null;
    const key = sign + count;
    if (lacking.has(key)) return null;
    for (let end = inside; end < to;) {
      if (text[end] === "\\") end += 2;
      else if (text[end] === "`") end = this.code(end, to, lacking)?.end ?? end + this.run(end, to);
      else if (text[end] === sign) {
        const length = this.run(end, to);
        const close = end + length - count;
        if ((length === count || length === 3) && !/\s/.test(text[end - 1]) && !(sign === "_" && word(end + length))) {
          const kinds = sign === "~" ? ["strike"] : [["emphasis"], ["strong"], ["strong", "emphasis"]][count - 1];
          let nodes = this.parse(inside, close, depth + 1);
          for (const kind of kinds) nodes = [{ kind, inside: nodes }];
          return { end: end + length, nodes };
        }
        end += length;
      } else end += 1;
    }
    lacking.add(key);
    return null;
  }

  link(at, to, depth) {
    const { text } = this, most = Math.min(to, at + LONGEST_LINK);
    let level = 0, close = at;
    for (; close < most; close++) {
      if (text[close] === "\\") close += 1;
      else if (text[close] === "[") level += 1;
      else if (text[close] === "]" && --level === 0) break;
    }
    if (close >= most || text[close + 1] !== "(") return null;
    const rest = /^\(\s*<?((?:[^\s()<>]|\([^\s()]*\))+)>?(?:\s+"[^"\n]*")?\s*\)/.exec(text.slice(close + 1, most));
    // Other schemes, such as javascript:, are no links.
    if (!rest || !SAFE.test(rest[1])) return null;
    const inside = this.parse(at + 1, close, depth + 1);
    return { end: close + 1 + rest[0].length, nodes: [{ kind: "link", href: rest[1], inside }] };
  }

  address(at, from, to) {
    if (at > from && /[\p{L}\p{N}_]/u.test(this.text[at - 1])) return null;
    const match = ADDRESS.exec(this.text.slice(at, Math.min(to, at + LONGEST_LINK)));
    if (!match) return null;
    let href = match[0].replace(/[.,;:!?*_~\]]+$/, "");
    if (href.endsWith(")") && !href.includes("(")) href = href.slice(0, -1);
    const end = at + href.length;
    return { end, nodes: [{ kind: "link", href, inside: [{ kind: "text", pieces: this.pieces(at, end) }] }] };
  }
}
