// What is no work: rounds above the lanes, misses through them, moments on them, a segment's way.
const BAD = new Set(["lost", "error", "dropped"]);
const markTop = (lane) => laneTop(lane) - 6;

function paintRounds(g) {
  roundRows.forEach((row, number) => {
    const top = 2 + ROUND * number, draw = (place) => {
      const round = row.list[place], to = toX(rounds.until[round]);
      paintRound(g, round, toX(rounds.at[round]), to, top);
      return to;
    };
    for (let i = lowerBound(row.reach, scale.from); i < row.list.length && row.starts[i] <= scale.to; ) {
      work.marks += 1;
      // Those that end in one pixel are one.
      i = lowerBound(row.reach, toTime(draw(i) + 1), i + 1);
    }
    const chosenPlace = chosen.round < 0 ? -1 : row.list.indexOf(chosen.round);
    if (chosenPlace >= 0) draw(chosenPlace);
  });
}

function paintRound(g, round, from, to, top) {
  g.fillStyle = round % 2 ? ink.lane : ink.line;
  g.fillRect(from, top, Math.max(1, to - from - 1), ROUND - 1);
  if (rounds.end[round] === "miss") {
    g.fillStyle = ink.dead;
    g.fillRect(to - 2, top, 2, ROUND - 1);
  }
  if (round === chosen.round) {
    g.strokeStyle = ink.focus;
    g.lineWidth = 2;
    g.strokeRect(from + 1, top, Math.max(2, to - from - 3), ROUND - 2);
    g.lineWidth = 1;
  }
  const left = Math.max(from, GUTTER) + 5, room = Math.min(to, scale.width) - left, count = rounds.tokens[round];
  if (room < 18) return;
  const long = `${roundRows.length > 1 ? `#${rounds.request[round]}: ` : ""}${plural(count, "token")}`;
  g.fillStyle = ink.soft;
  if (room > g.measureText(long).width + 6) g.fillText(long, left, top + 11);
  else if (room > g.measureText(`${count}`).width + 6) g.fillText(`${count}`, left, top + 11);
}

function roundAt(x, y) {
  const row = roundRows[Math.floor((y - 2) / ROUND)], time = toTime(x);
  let found = -1;
  if (row) touching(row, time, time, (round) => { found = round; });
  return found;
}

// Calls `visit(place, x)` for ascending moments in the window, one in `apart` pixels at most.
function scattered(moments, apart, visit) {
  const end = lowerBound(moments, scale.to);
  for (let i = lowerBound(moments, scale.from); i < end; ) {
    const x = toX(moments[i]);
    work.marks += 1;
    visit(i, x);
    i = lowerBound(moments, toTime(x + apart), i + 1);
  }
}

function paintMisses(g) {
  const top = BAND + 30, bottom = canvasHeight() - GAP;
  g.strokeStyle = g.fillStyle = ink.dead;
  g.setLineDash([3, 4]);
  g.globalAlpha = 0.7;
  g.beginPath();
  // Where there are many, their crosses say it: lines that stand closer would hide the rest.
  scattered(misses, 12, (_, x) => { g.moveTo(Math.round(x) + 0.5, top); g.lineTo(Math.round(x) + 0.5, bottom); });
  g.stroke();
  g.globalAlpha = 1;
  g.setLineDash([]);
  scattered(misses, 6, (_, x) => g.fillText("×", Math.round(x) - 3, BAND + 27));
}

// Prunes first: what is rarer is drawn over them.
function paintMarks(g) {
  lanes.forEach(({ prunes, moments }, lane) => {
    const y = markTop(lane) + 3;
    g.fillStyle = ink.ink;
    if (lowerBound(prunes.at, scale.to) - lowerBound(prunes.at, scale.from) > plotWidth() / 10) {
      paintCrowd(g, prunes.at, y + 2);
    } else {
      scattered(prunes.at, 2, (_, x) => drawMark(g, PRUNE, Math.round(x), y));
    }
    scattered(moments.at, 2, (i, x) => {
      const kind = marks.kind[moments.list[i]];
      g.fillStyle = markInk(kind);
      drawMark(g, kind, Math.round(x), y);
    });
  });
}

// Too many moments to tell apart: how many there are, as columns.
function paintCrowd(g, moments, bottom) {
  const size = 3, bins = binsOf(plotWidth(), size), step = (bins.to - bins.from) / bins.count, counts = [];
  let place = lowerBound(moments, bins.from);
  for (let i = 1; i <= bins.count; i++) {
    const next = lowerBound(moments, bins.from + i * step, place);
    counts.push(next - place);
    place = next;
  }
  work.marks += bins.count;
  g.fillStyle = ink.soft;
  const most = Math.max(...counts);
  counts.forEach((count, i) => {
    const height = Math.ceil((5 * count) / most);
    g.fillRect(GUTTER - bins.offset + i * size, bottom - height, size, height);
  });
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
  const slack = (5 * (scale.to - scale.from)) / plotWidth(), time = toTime(x);
  const found = [lanes[lane].prunes, lanes[lane].moments].flatMap(({ list, at }) =>
    list.slice(lowerBound(at, time - slack), lowerBound(at, time + slack)));
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
