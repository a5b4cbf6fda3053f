// Moments on the lanes: prunes, and what is rarer.
const BAD = new Set(["lost", "error", "dropped"]);
const markTop = (lane) => laneTop(lane) - 6;

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
