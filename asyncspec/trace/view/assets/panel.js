// What stands beside the picture: the selection, the summary, the notes. Text is only ever text.
function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function definitions(pairs) {
  const list = document.createElement("dl");
  for (const [name, value] of pairs) {
    element("dt", name, list);
    element("dd", value, list);
  }
  return list;
}

const OUTCOMES = {
  judged: "a verdict came back", pruned: "all of it was pruned", lost: "the session ended before",
  prompt: "part of the prompt",
};

function nodeRange(first, last) {
  return first < 0 ? "none" : first === last ? `${first}` : `${first} to ${last}`;
}

function describeJourney(journey) {
  const pairs = [
    ["session", `${journeys.session[journey]}`],
    ["nodes", `${journeys.nodes[journey]} (${nodeRange(journeys.first[journey], journeys.last[journey])}), ` +
      `${journeys.useful[journey]} useful`],
    ["outcome", OUTCOMES[journeys.outcome[journey]] ?? journeys.outcome[journey]],
    ["tokens brought", `${journeys.brought[journey]}`],
    ["sent", milliseconds(journeys.sent[journey])],
  ];
  for (const [lane, received, started, ended] of journeys.hops[journey]) {
    const waited = started < 0 ? "never computed" : `waited ${milliseconds(started - received)}, ` +
      `computed ${milliseconds(ended - started)}`;
    pairs.push([lanes[lane].name, waited]);
  }
  if (journeys.judged[journey] >= 0) {
    const total = journeys.judged[journey] - journeys.sent[journey];
    pairs.push(["judged", `${milliseconds(journeys.judged[journey])}, after ${milliseconds(total)}`]);
  }
  return pairs;
}

function describeSpan(span) {
  const kind = model.kinds[spans.kind[span]], lines = [];
  const name = spans.segment[span] >= 0 ? `segment ${spans.segment[span]}` : "";
  const titles = { compute: "computes", draft: "drafts", cache: "tidies its cache", send: "waits for the network",
    transfer: "is sending",
    queue: "waits for the device", credit: "waits for credit", step: "takes a step", silence: "hears nothing" };
  lines.push(`${lanes[spans.lane[span]].name} ${titles[kind]} ${name}`.trim());
  lines.push(`${milliseconds(spans.at[span])} + ${milliseconds(spans.until[span] - spans.at[span])}`);
  if (kind === "compute") {
    const rows = spans.rows[span], useful = spans.useful[span], dead = spans.dead[span];
    lines.push(`${rows} rows: ${useful} useful, ${rows - useful - dead} wrong, ${dead} dead`);
    lines.push(`nodes ${nodeRange(spans.first[span], spans.last[span])}`);
  }
  if (kind === "draft") lines.push(`${spans.rows[span]} nodes asked for`);
  if (spans.nbytes[span] > 0) lines.push(`${spans.nbytes[span].toLocaleString("en")} bytes`);
  if (spans.peer[span] >= 0) lines.push(`peer ${spans.peer[span] ? "V" + spans.peer[span] : "D0"}`);
  if (spans.session[span] >= 0) lines.push(`session ${spans.session[span]}`);
  return lines.join("\n");
}

function showSelection() {
  const place = document.getElementById("selected");
  place.replaceChildren();
  if (chosen.journey < 0) {
    element("p", "Click a block or a token, or press n.", place);
    return;
  }
  const title = element("p", `Segment ${journeys.segment[chosen.journey]}`, place);
  title.style.color = "inherit";
  title.style.fontWeight = "600";
  place.append(definitions(describeJourney(chosen.journey)));
}

function showSummary() {
  const { summary } = model;
  document.getElementById("title").textContent = model.title || "asyncspec trace";
  document.getElementById("subtitle").textContent =
    `${lanes.length - 1} stages, ${tokens.at.length} tokens, ${rounds.at.length} rounds, ` +
    `${milliseconds(model.duration)} · recorded ${model.created.slice(0, 19).replace("T", " ")} by ${model.program}`;
  const list = document.getElementById("noted");
  for (const note of model.notes) element("li", note, list);
  document.getElementById("notes").hidden = model.notes.length === 0;
  for (const id of ["summary", "time"]) document.getElementById(id).hidden = !summary;
  if (!summary) return;
  document.getElementById("bottleneck").textContent = summary.bottleneck;
  showShares(summary.devices);
  showPath(summary.decoding.length ? summary.decoding : summary.requests);
}

const percent = (share) => `${Math.round(share * 100)} %`;

function tableOf(parent, heads) {
  const table = element("table", undefined, parent), row = element("tr", undefined, element("thead", undefined, table));
  for (const head of heads) element("th", head, row).scope = "col";
  return element("tbody", undefined, table);
}

function showShares(devices) {
  const heads = ["device", "", "busy", "useful", "wrong", "dead", "draft", "credit", "idle"];
  const body = tableOf(document.getElementById("shares"), heads);
  for (const device of devices) {
    const row = element("tr", undefined, body);
    element("td", device.device, row);
    const meter = element("span", undefined, element("td", undefined, row));
    meter.className = "meter";
    const parts = [["useful", ink.useful], ["wrong", ink.wrong], ["dead", ink.dead], ["drafting", ink.draft],
      ["credit", ink.credit]];
    for (const [name, colour] of parts) {
      const bar = element("i", undefined, meter);
      bar.style.width = `${device[name] * 100}%`;
      bar.style.background = colour;
    }
    for (const name of ["busy", "useful", "wrong", "dead", "drafting", "credit", "idle"]) {
      element("td", percent(device[name]), row);
    }
  }
}

function showPath(accounts) {
  const sums = new Map();
  let total = 0;
  for (const account of accounts) {
    total += account.seconds;
    for (const [kind, seconds] of Object.entries(account.kinds)) sums.set(kind, (sums.get(kind) ?? 0) + seconds);
  }
  const body = tableOf(document.getElementById("path"), ["work", "ms", "share"]);
  for (const [kind, seconds] of [...sums].sort((a, b) => b[1] - a[1]).slice(0, 12)) {
    const row = element("tr", undefined, body);
    element("td", kind, row);
    element("td", (seconds * 1e3).toFixed(1), row);
    element("td", percent(seconds / (total || 1)), row);
  }
}
