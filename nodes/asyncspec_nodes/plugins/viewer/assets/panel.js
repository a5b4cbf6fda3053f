// The selection, in words: a segment, and what every stage did with it. Text is only ever text.
function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function definitions(parent, pairs) {
  const list = element("dl", undefined, parent);
  for (const [name, value] of pairs) {
    element("dt", name, list);
    element("dd", value, list);
  }
}

function tableOf(parent, heads) {
  const table = element("table", undefined, parent), row = element("tr", undefined, element("thead", undefined, table));
  for (const head of heads) element("th", head, row).scope = "col";
  return element("tbody", undefined, table);
}

function rowOf(body, cells) {
  const row = element("tr", undefined, body);
  for (const cell of cells) element("td", cell, row);
  return row;
}

const OUTCOMES = {
  verified: "a verdict came back", pruned: "pruned on the way", lost: "the session ended before",
  prompt: "part of the prompt",
};

function describeLifetime(lifetime) {
  const sent = lifetimes.sent[lifetime], verified = lifetimes.verified[lifetime], outcome = lifetimes.outcome[lifetime];
  const hops = lifetimes.hops[lifetime], last = hops.length ? lanes[hops[hops.length - 1][0]].name : "";
  const where = outcome === "pruned" && last ? `, last seen at ${last}` : "";
  const after = verified < 0 ? "" : ` at ${milliseconds(verified)}, after ${milliseconds(verified - sent)}`;
  const emitted = emittedBy.get(lifetime) ?? [];
  const text = emitted.map((i) => tokens.text[i]).join("");
  return [
    ["session", `${lifetimes.session[lifetime]}`],
    ["nodes", `${lifetimes.nodes[lifetime]} (${nodeRange(lifetimes.first[lifetime], lifetimes.last[lifetime])}), ` +
      `${lifetimes.useful[lifetime]} useful`],
    ["outcome", `${OUTCOMES[outcome] ?? outcome}${where}${after}`],
    ["emitted", plural(lifetimes.emitted[lifetime], "token") + (text ? `: ${JSON.stringify(text)}` : "")],
    ["sent", milliseconds(sent)],
  ];
}

function showHops(parent, lifetime) {
  if (!lifetimes.hops[lifetime].length) return;
  const passes = new Map(chosen.spans.filter((i) => spans.kind[i] === KIND.compute).map((i) => [spans.lane[i], i]));
  const heads = ["stage", "came", "useful", "wrong", "dead", "went on", "waited", "computed"];
  const body = tableOf(parent, heads);
  const lasted = (from, to) => (from < 0 || to < 0 ? "–" : milliseconds(to - from));
  for (const [lane, received, started, ended, , came, , went] of lifetimes.hops[lifetime]) {
    const pass = passes.get(lane);
    const split = pass === undefined || spans.useful[pass] < 0 ? ["–", "–", "–"] : [spans.useful[pass],
      spans.rows[pass] - spans.useful[pass] - spans.dead[pass], spans.dead[pass]];
    rowOf(body, [lanes[lane].name, came, ...split, went, lasted(received, started), lasted(started, ended)]);
  }
}

function showSelection() {
  const place = document.getElementById("selected");
  place.replaceChildren();
  if (chosen.lifetime < 0) {
    element("p", chosen.token < 0 ? "Click a block or a token, or press n."
      : `Nobody recorded which segment brought token ${tokens.index[chosen.token] + 1}.`, place);
    return;
  }
  element("p", `Segment ${lifetimes.segment[chosen.lifetime]}`, place).className = "name";
  definitions(place, describeLifetime(chosen.lifetime));
  showHops(place, chosen.lifetime);
}

function showRound(round) {
  const place = document.getElementById("selected");
  place.replaceChildren();
  for (const line of describeRound(round).split("\n")) element("p", line, place);
}
