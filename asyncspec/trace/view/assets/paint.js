// Drawing. Blocks narrower than a pixel are summed up by column, so that a frame's cost is bounded
// by what is visible and no block is drawn twice.
const view = document.getElementById("view"), map = document.getElementById("map");
const painted = { frames: 0, lastFrameMs: 0 };
const chosen = { journey: -1, token: -1 };
const FULL = 5; // kinds of work in a column: useful, wrong, dead, draft, cache

function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  return g;
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const start = performance.now();
    paint();
    painted.lastFrameMs = performance.now() - start;
    painted.frames += 1;
  });
}

function paint() {
  scale.width = view.clientWidth;
  const g = fit(view, canvasHeight());
  paintGrid(g);
  g.save();
  g.beginPath();
  g.rect(GUTTER, 0, plotWidth() + 8, canvasHeight());
  g.clip();
  paintRounds(g);
  for (let lane = 0; lane < lanes.length; lane++) paintLane(g, lane);
  paintMarks(g);
  if (chosen.journey >= 0) paintJourney(g, chosen.journey);
  g.restore();
  paintMap();
}

function paintGrid(g) {
  const bottom = canvasHeight(), step = tickStep();
  for (let lane = 0; lane < lanes.length; lane++) {
    g.fillStyle = ink.lane;
    g.fillRect(GUTTER, laneTop(lane), plotWidth(), DEVICE);
    g.fillRect(GUTTER, stripTop(lane), plotWidth(), STRIP);
    g.fillStyle = ink.ink;
    g.font = "600 13px system-ui, sans-serif";
    g.fillText(lanes[lane].name, 12, laneTop(lane) + 15);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = ink.soft;
    g.fillText(lanes[lane].detail, 12, laneTop(lane) + 29);
    g.fillText("busy", GUTTER - 34, stripTop(lane) + 12);
  }
  g.fillText("rounds", 12, 13);
  g.textAlign = "center";
  for (let time = Math.ceil(scale.from / step) * step; time <= scale.to; time += step) {
    const x = toX(time);
    g.fillStyle = ink.line;
    g.fillRect(x, BAND + 16, 1, bottom);
    g.fillStyle = ink.soft;
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e3)));
    g.fillText(`${(time / 1e3).toFixed(digits)} ms`, x, BAND + 12);
  }
  g.textAlign = "left";
}

function paintRounds(g) {
  for (let i = 0; i < rounds.at.length; i++) {
    if (rounds.until[i] < scale.from || rounds.at[i] > scale.to) continue;
    const from = toX(rounds.at[i]), to = toX(rounds.until[i]);
    g.fillStyle = i % 2 ? ink.lane : ink.line;
    g.fillRect(from, 2, Math.max(1, to - from - 1), BAND - 4);
    if (to - from > 26) {
      g.fillStyle = ink.soft;
      const left = Math.max(from, GUTTER) + 5, count = rounds.tokens[i];
      const long = `${count} token${count === 1 ? "" : "s"}`;
      g.fillText(to - left > 60 ? long : `${count}`, left, 13);
    }
  }
}

// Shares of a pass: useful, wrong, dead; drafts and the cache's upkeep are kinds of their own.
function shares(span) {
  if (spans.kind[span] === KIND.draft) return [0, 0, 0, 1, 0];
  if (spans.kind[span] === KIND.cache) return [0, 0, 0, 0, 1];
  const rows = spans.rows[span] || 1, useful = spans.useful[span] / rows, dead = spans.dead[span] / rows;
  return [useful, 1 - useful - dead, dead, 0, 0];
}

function workFills() {
  return [ink.useful, ink.wrongFill, ink.deadFill, ink.draft, ink.step];
}

function paintLane(g, lane) {
  const fills = workFills(), width = Math.ceil(plotWidth()) + 2;
  const columns = new Float32Array(width * FULL), strip = new Float32Array(width * FULL);
  const dim = chosen.journey >= 0;
  const top = rowTop(lane, 0);
  touching(lanes[lane].rows[0], scale.from, scale.to, (span) => {
    const from = Math.max(GUTTER, toX(spans.at[span])), to = Math.min(GUTTER + width, toX(spans.until[span]));
    const parts = shares(span);
    spread(strip, from - GUTTER, to - GUTTER, parts);
    if (to - from < 1.5) {
      spread(columns, from - GUTTER, to - GUTTER, parts);
    } else {
      g.globalAlpha = dim && spans.journey[span] !== chosen.journey ? 0.28 : 1;
      stack(g, from, top, Math.max(1, to - from - 0.5), DEVICE, parts, fills);
      label(g, span, from, to, top);
    }
  });
  g.globalAlpha = dim ? 0.28 : 1;
  heap(g, columns, 1, top, DEVICE, fills);
  g.globalAlpha = 1;
  heap(g, strip, 4, stripTop(lane), STRIP, fills);
  paintThin(g, lane, 1);
  paintThin(g, lane, 2);
}

// Adds a stretch [from, to] in pixels to the columns it covers.
function spread(columns, from, to, parts) {
  const last = columns.length / FULL - 1;
  for (let column = Math.max(0, Math.floor(from)); column <= Math.min(last, to); column++) {
    const share = Math.min(to, column + 1) - Math.max(from, column);
    for (let part = 0; part < FULL; part++) columns[column * FULL + part] += share * parts[part];
  }
}

function stack(g, x, top, width, height, parts, fills) {
  let bottom = top + height;
  for (let part = 0; part < FULL; part++) {
    if (!parts[part]) continue;
    const size = parts[part] * height;
    g.fillStyle = fills[part];
    g.fillRect(x, bottom - size, width, size);
    bottom -= size;
  }
}

// Columns as stacked bars of `step` pixels: their height is the share of time.
function heap(g, columns, step, top, height, fills) {
  const count = columns.length / FULL;
  for (let part = 0; part < FULL; part++) {
    g.fillStyle = fills[part];
    for (let column = 0; column < count; column += step) {
      let below = 0, mine = 0;
      for (let c = column; c < Math.min(count, column + step); c++) {
        for (let p = 0; p < part; p++) below += columns[c * FULL + p];
        mine += columns[c * FULL + part];
      }
      if (mine < 0.01) continue;
      const low = Math.min(1, below / step), high = Math.min(1, (below + mine) / step);
      g.fillRect(GUTTER + column, top + height * (1 - high), step, height * (high - low));
    }
  }
}

function label(g, span, from, to, top) {
  if (to - from < 34 || spans.segment[span] < 0 && spans.kind[span] !== KIND.draft) return;
  const text = spans.kind[span] === KIND.draft ? "draft" : `${spans.segment[span]}`;
  const width = g.measureText(text).width;
  if (width > to - from - 8) return;
  g.fillStyle = ink.panel;
  g.fillRect(from + 3, top + 3, width + 4, 13);
  g.fillStyle = ink.ink;
  g.fillText(text, from + 5, top + 13);
}

// Waits, the network and the node's own steps: thin rows, where neighbours in a pixel are one.
function paintThin(g, lane, row) {
  const top = rowTop(lane, row), height = rowHeight(row);
  const fills = { [KIND.queue]: ink.queueFill, [KIND.credit]: ink.credit, [KIND.send]: ink.sendFill, [KIND.transfer]: ink.send,
    [KIND.step]: ink.step, [KIND.silence]: ink.dead };
  let drawnTo = -1, drawnKind = -1;
  touching(lanes[lane].rows[row], scale.from, scale.to, (span) => {
    const from = toX(spans.at[span]), to = Math.max(from + 1, toX(spans.until[span])), kind = spans.kind[span];
    if (kind === drawnKind && to <= drawnTo) return;
    g.fillStyle = fills[kind];
    g.globalAlpha = chosen.journey >= 0 && spans.journey[span] !== chosen.journey ? 0.35 : 1;
    g.fillRect(from, top, to - from, height);
    drawnTo = to;
    drawnKind = kind;
  });
  g.globalAlpha = 1;
}

function paintMarks(g) {
  const bottom = canvasHeight() - GAP;
  g.strokeStyle = ink.dead;
  g.setLineDash([3, 4]);
  let last = -9;
  for (const time of misses) {
    const x = Math.round(toX(time)) + 0.5;
    if (time < scale.from || time > scale.to || x - last < 3) continue;
    last = x;
    g.globalAlpha = 0.7;
    g.beginPath(); g.moveTo(x, BAND + 30); g.lineTo(x, bottom); g.stroke();
    g.globalAlpha = 1;
    g.fillStyle = ink.dead;
    g.fillText("×", x - 3, BAND + 27);
  }
  g.setLineDash([]);
  const seen = new Int32Array(lanes.length).fill(-9);
  for (let i = 0; i < marks.at.length; i++) {
    if (marks.at[i] < scale.from || marks.at[i] > scale.to || marks.kind[i] === "miss") continue;
    const x = Math.round(toX(marks.at[i])), lane = marks.lane[i];
    if (x - seen[lane] < 2) continue;
    seen[lane] = x;
    const top = laneTop(lane);
    g.fillStyle = marks.kind[i] === "prune" ? ink.ink : ink.credit;
    g.beginPath(); g.moveTo(x - 3, top - 5); g.lineTo(x + 3, top - 5); g.lineTo(x, top + 1); g.fill();
  }
}

function paintJourney(g, journey) {
  const points = path(journey);
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

// The whole run, all devices together, and the window on it. Drawn once a size; then copied.
let mapImage = null;
function paintMap() {
  const height = 40, g = fit(map, height), width = map.clientWidth;
  if (!mapImage || mapImage.wide !== width) mapImage = { wide: width, columns: mapColumns(width) };
  const fills = workFills(), { columns } = mapImage;
  for (let x = 0; x < width - GUTTER; x++) {
    let bottom = height - 3;
    for (let part = 0; part < FULL; part++) {
      const size = (columns[x * FULL + part] / lanes.length) * (height - 6);
      if (size < 0.05) continue;
      g.fillStyle = fills[part];
      g.fillRect(GUTTER + x, bottom - size, 1, size);
      bottom -= size;
    }
  }
  g.fillStyle = ink.soft;
  g.fillText("whole run", 12, 24);
  const share = (time) => GUTTER + ((time + MARGIN) / (model.duration + 2 * MARGIN)) * (width - GUTTER - 8);
  const from = share(scale.from), to = share(scale.to);
  g.fillStyle = ink.paper;
  g.globalAlpha = 0.6;
  g.fillRect(GUTTER, 0, from - GUTTER, height);
  g.fillRect(to, 0, width - to, height);
  g.globalAlpha = 1;
  g.strokeStyle = ink.focus;
  g.lineWidth = 2;
  g.strokeRect(from, 1, Math.max(3, to - from), height - 2);
  g.lineWidth = 1;
}

function mapColumns(width) {
  const columns = new Float32Array(width * FULL);
  const pixels = (time) => ((time + MARGIN) / (model.duration + 2 * MARGIN)) * (width - GUTTER - 8);
  for (const lane of lanes) {
    for (const span of lane.rows[0].list) {
      spread(columns, pixels(spans.at[span]), pixels(spans.until[span]), shares(span));
    }
  }
  return columns;
}
