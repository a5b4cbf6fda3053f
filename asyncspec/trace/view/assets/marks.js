// What is no work: rounds above the lanes, misses through them, moments on them, a segment's way.
const PRUNE = "prune", BAD = new Set(["lost", "error", "dropped"]);
const markTop = (lane) => laneTop(lane) - 6;

function paintRounds(g) {
  const several = roundRow.count > 1;
  for (let i = 0; i < rounds.at.length; i++) {
    if (rounds.until[i] < scale.from || rounds.at[i] > scale.to) continue;
    const from = toX(rounds.at[i]), to = toX(rounds.until[i]), top = 2 + ROUND * roundRow.of(i);
    g.fillStyle = i % 2 ? ink.lane : ink.line;
    g.fillRect(from, top, Math.max(1, to - from - 1), ROUND - 1);
    if (rounds.end[i] === "miss") {
      g.fillStyle = ink.dead;
      g.fillRect(to - 2, top, 2, ROUND - 1);
    }
    if (i === chosen.round) {
      g.strokeStyle = ink.focus;
      g.lineWidth = 2;
      g.strokeRect(from + 1, top, Math.max(2, to - from - 3), ROUND - 2);
      g.lineWidth = 1;
    }
    const left = Math.max(from, GUTTER) + 5, count = rounds.tokens[i];
    if (to - left < 18) continue;
    const long = `${several ? `#${rounds.request[i]}: ` : ""}${plural(count, "token")}`;
    g.fillStyle = ink.soft;
    g.fillText(to - left > g.measureText(long).width + 6 ? long : `${count}`, left, top + 11);
  }
}

function roundAt(x, y) {
  const time = toTime(x), row = Math.floor((y - 2) / ROUND);
  if (y > BAND) return -1;
  return rounds.at.findIndex((at, i) => roundRow.of(i) === row && at <= time && time <= rounds.until[i]);
}

function paintMisses(g) {
  const bottom = canvasHeight() - GAP;
  g.strokeStyle = g.fillStyle = ink.dead;
  g.setLineDash([3, 4]);
  let last = -9;
  for (let i = lowerBound(misses, scale.from); i < misses.length && misses[i] <= scale.to; i++) {
    const x = Math.round(toX(misses[i])) + 0.5;
    if (x - last < 3) continue;
    last = x;
    g.globalAlpha = 0.7;
    g.beginPath(); g.moveTo(x, BAND + 30); g.lineTo(x, bottom); g.stroke();
    g.globalAlpha = 1;
    g.fillText("×", x - 3.5, BAND + 27);
  }
  g.setLineDash([]);
}

// Prunes first: what is rarer is drawn over them. A miss has a line of its own.
function paintMarks(g) {
  const first = lowerBound(marks.at, scale.from), end = lowerBound(marks.at, scale.to);
  for (const prunes of [true, false]) {
    const seen = new Int32Array(lanes.length).fill(-9);
    for (let i = first; i < end; i++) {
      const kind = marks.kind[i], lane = marks.lane[i], x = Math.round(toX(marks.at[i]));
      if (kind === "miss" || (kind === PRUNE) !== prunes || x - seen[lane] < 2) continue;
      seen[lane] = x;
      g.fillStyle = markInk(kind);
      drawMark(g, kind, x, markTop(lane) + 3);
    }
  }
}

const markInk = (kind) => (kind === PRUNE ? ink.ink : BAD.has(kind) ? ink.dead : ink.focus);

// Prunes point down at what they cut; the others are diamonds.
function drawMark(g, kind, x, y) {
  g.beginPath();
  if (kind === PRUNE) { g.moveTo(x - 3.5, y - 3); g.lineTo(x + 3.5, y - 3); g.lineTo(x, y + 3); }
  else { g.moveTo(x - 3.5, y); g.lineTo(x, y - 3.5); g.lineTo(x + 3.5, y); g.lineTo(x, y + 3.5); }
  g.fill();
}

// Marks near a place, the nearest first.
function marksAt(x, y) {
  const lane = Math.floor((y - markTop(0) + 2) / LANE);
  if (!lanes[lane] || y > laneTop(lane)) return [];
  const slack = (5 * (scale.to - scale.from)) / plotWidth(), time = toTime(x), found = [];
  for (let i = lowerBound(marks.at, time - slack); i < marks.at.length && marks.at[i] <= time + slack; i++) {
    if (marks.lane[i] === lane) found.push(i);
  }
  return found.sort((a, b) => Math.abs(marks.at[a] - time) - Math.abs(marks.at[b] - time));
}

function paintJourney(g, journey) {
  const points = path(journey), [endX, endY] = points[points.length - 1];
  const ended = journeys.judged[journey] < 0 && journeys.outcome[journey] !== "prompt";
  g.lineJoin = "round";
  for (const [width, colour] of [[5, ink.panel], [2.2, ink.focus]]) {
    g.lineWidth = width;
    g.strokeStyle = colour;
    g.beginPath();
    points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
    g.stroke();
  }
  g.fillStyle = ink.focus;
  for (const [x, y] of points) { g.beginPath(); g.arc(x, y, 3.2, 0, 7); g.fill(); }
  // Where it died, or was last seen.
  if (ended) {
    for (const [width, colour] of [[6, ink.panel], [2.6, ink.dead]]) {
      g.lineWidth = width;
      g.strokeStyle = colour;
      g.beginPath();
      g.moveTo(endX - 5, endY - 5); g.lineTo(endX + 5, endY + 5);
      g.moveTo(endX - 5, endY + 5); g.lineTo(endX + 5, endY - 5);
      g.stroke();
    }
  }
  g.lineWidth = 1;
}

// Corners of a segment's way: sent, received, started, ended, sent on, ..., judged.
function path(journey) {
  const middle = (lane, row) => rowTop(lane, row) + rowHeight(row) / 2;
  const points = [[toX(journeys.sent[journey]), middle(0, 2)]];
  for (const [lane, received, started, ended, sent] of journeys.hops[journey]) {
    if (received >= 0) points.push([toX(received), middle(lane, 1)]);
    if (started >= 0) points.push([toX(started), middle(lane, 0)]);
    if (ended >= 0) points.push([toX(ended), middle(lane, 0)]);
    if (sent >= 0) points.push([toX(sent), middle(lane, 2)]);
  }
  if (journeys.judged[journey] >= 0) points.push([toX(journeys.judged[journey]), middle(0, 2)]);
  return points;
}
