// The model, and indices into its columns. Spans come sorted by their start.
const model = JSON.parse(document.getElementById("data").textContent);
const { spans, lifetimes, tokens, rounds, marks } = model;
const KIND = Object.fromEntries(model.kinds.map((kind, i) => [kind, i]));

// Kinds of work in a device's row, from the bottom up: a pass is split by its rows.
const WORK = ["useful", "wrong", "dead", "unknown", "draft", "cache"];
const [UNKNOWN, DRAFTING, TIDYING] = ["unknown", "draft", "cache"].map(
  (kind) => WORK.map((one) => (one === kind ? 1 : 0)));
function workOf(span) {
  if (spans.kind[span] === KIND.draft) return DRAFTING;
  if (spans.kind[span] === KIND.cache) return TIDYING;
  const rows = spans.rows[span];
  if (!rows || spans.useful[span] < 0) return UNKNOWN;
  const useful = spans.useful[span] / rows, dead = spans.dead[span] / rows;
  return [useful, 1 - useful - dead, dead, 0, 0, 0];
}

// Rows of a lane: the device; what waits for it; the network, the node's own steps and the rest.
const WAITS = ["queue", "credit"], LINES = model.kinds.filter(
  (kind) => !["compute", "draft", "cache", ...WAITS].includes(kind));
const THIN = [null, WAITS, LINES];
const ROW_OF = model.kinds.map((kind) => (WAITS.includes(kind) ? 1 : LINES.includes(kind) ? 2 : 0));

const lanes = model.lanes.map((lane) => ({ ...lane, lists: [[], [], []] }));
for (let i = 0; i < spans.at.length; i++) lanes[spans.lane[i]].lists[ROW_OF[spans.kind[i]]].push(i);
for (const lane of lanes) {
  const only = (kinds) => (span) => kinds.map((kind) => (KIND[kind] === spans.kind[span] ? 1 : 0));
  lane.rows = [
    sealRow(spans, lane.lists[0], WORK.length, workOf),
    sealRow(spans, lane.lists[1], WAITS.length, only(WAITS)),
    sealRow(spans, lane.lists[2], LINES.length, only(LINES)),
  ];
}

// Moments on a lane, by time: prunes, of which there are many; the others. A miss has a line of its
// own instead.
const PRUNE = "prune";
lanes.forEach((lane, number) => {
  const those = (fits) => {
    const list = [];
    marks.kind.forEach((kind, i) => { if (marks.lane[i] === number && fits(kind)) list.push(i); });
    return { list, at: Float64Array.from(list, (i) => marks.at[i]) };
  };
  lane.prunes = those((kind) => kind === PRUNE);
  lane.moments = those((kind) => kind !== PRUNE && kind !== "miss");
});

// A lifetime's spans, in order of time. Asked once a selection: a pass over all is quick enough.
function spansOf(lifetime) {
  const found = [];
  for (let i = 0; i < spans.lifetime.length; i++) if (spans.lifetime[i] === lifetime) found.push(i);
  return found;
}

// Tokens by the lifetime that brought them.
const emittedBy = new Map();
tokens.lifetime.forEach((lifetime, i) => {
  if (!emittedBy.has(lifetime)) emittedBy.set(lifetime, []);
  emittedBy.get(lifetime).push(i);
});
emittedBy.delete(-1);

// Rounds that ended by a miss, by the moment of the miss.
const missed = rounds.at.map((_, i) => i).filter((i) => rounds.end[i] === "miss")
  .sort((a, b) => rounds.until[a] - rounds.until[b]);
const misses = missed.map((i) => rounds.until[i]);

// Requests that run at the same time have their rounds in rows of their own, as far as there is room.
const MOST_ROUND_ROWS = 4;
const roundRows = (() => {
  const lives = new Map(), ends = [], rows = new Map();
  rounds.request.forEach((request, i) => {
    const life = lives.get(request) ?? { from: Infinity, to: 0 };
    lives.set(request, { from: Math.min(life.from, rounds.at[i]), to: Math.max(life.to, rounds.until[i]) });
  });
  for (const [request, life] of [...lives].sort((a, b) => a[1].from - b[1].from)) {
    let row = ends.findIndex((end) => end <= life.from);
    if (row < 0) row = ends.length < MOST_ROUND_ROWS ? ends.length : ends.indexOf(Math.min(...ends));
    ends[row] = life.to;
    rows.set(request, row);
  }
  const count = Math.max(1, ends.length), lists = Array.from({ length: count }, () => []);
  rounds.request.forEach((request, i) => lists[rows.get(request)].push(i));
  return lists.map((list) => sealRow(rounds, list, 0, () => []));
})();

function milliseconds(time) {
  if (time >= 1e7) return `${(time / 1e6).toFixed(3)} s`;
  return `${(time / 1e3).toFixed(time < 1e4 ? 3 : time < 1e6 ? 2 : 1)} ms`;
}

const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
