// The model, and indices into its columns. Spans come sorted by their start.
const model = JSON.parse(document.getElementById("data").textContent);
const { spans, journeys, tokens, rounds, marks } = model;
const KIND = Object.fromEntries(model.kinds.map((kind, i) => [kind, i]));
const ROWS = ["device", "wait", "line"];
const ROW_OF = model.kinds.map((kind) =>
  ({ compute: 0, draft: 0, cache: 0, queue: 1, credit: 1 })[kind] ?? 2);

// Of every lane and row: its spans, and the longest of them, which bounds how far back to look.
const lanes = model.lanes.map((lane) => ({
  ...lane,
  rows: ROWS.map(() => ({ list: [], longest: 0 })),
}));
for (let i = 0; i < spans.at.length; i++) {
  const row = lanes[spans.lane[i]].rows[ROW_OF[spans.kind[i]]];
  row.list.push(i);
  row.longest = Math.max(row.longest, spans.until[i] - spans.at[i]);
}

// First place in `list` (span numbers by start) whose start is at or after `time`.
function lowerBound(list, time) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.at[list[middle]] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// Calls `visit(span)` for the spans of a row that touch [from, to].
function touching(row, from, to, visit) {
  const { list, longest } = row;
  for (let i = lowerBound(list, from - longest); i < list.length; i++) {
    const span = list[i];
    if (spans.at[span] > to) break;
    if (spans.until[span] >= from) visit(span);
  }
}

// Tokens by the journey that brought them.
const broughtBy = new Map();
tokens.journey.forEach((journey, i) => {
  if (journey >= 0) broughtBy.set(journey, [...(broughtBy.get(journey) ?? []), i]);
});

const misses = [];
rounds.end.forEach((end, i) => { if (end === "miss") misses.push(rounds.until[i]); });
misses.sort((a, b) => a - b);

function milliseconds(time) {
  const digits = time < 1e4 ? 3 : time < 1e6 ? 2 : 1;
  return `${(time / 1e3).toFixed(digits)} ms`;
}
