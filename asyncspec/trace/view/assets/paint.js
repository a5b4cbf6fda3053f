// Drawing. Blocks narrower than a pixel are summed up by column; where there are more blocks than
// pixels, columns come from the rows' sums at once.
const view = document.getElementById("view");
const painted = { frames: 0, lastFrameMs: 0 };
const chosen = { journey: -1, token: -1, round: -1, spans: [] };
const FADED = 0.28;

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
  g.rect(GUTTER, 0, plotWidth(), canvasHeight());
  g.clip();
  paintRounds(g);
  for (let lane = 0; lane < lanes.length; lane++) paintLane(g, lane);
  paintMisses(g);
  paintMarks(g);
  if (chosen.journey >= 0) paintJourney(g, chosen.journey);
  g.restore();
  paintMap();
}

function paintGrid(g) {
  const bottom = canvasHeight(), step = tickStep();
  for (let lane = 0; lane < lanes.length; lane++) {
    const middle = laneTop(lane) + DEVICE / 2;
    g.fillStyle = ink.lane;
    g.fillRect(GUTTER, laneTop(lane), plotWidth(), DEVICE);
    g.fillRect(GUTTER, stripTop(lane), plotWidth(), STRIP);
    g.fillStyle = ink.ink;
    g.font = "600 13px system-ui, sans-serif";
    g.fillText(lanes[lane].name, 12, middle);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = ink.soft;
    g.fillText(lanes[lane].detail, 12, middle + 14);
    g.textAlign = "right";
    g.fillText("busy", GUTTER - 8, stripTop(lane) + STRIP / 2 + 4);
    g.textAlign = "left";
  }
  g.fillText("rounds", 12, 14);
  g.textAlign = "center";
  const inSeconds = step >= 1e6, unit = inSeconds ? 1e6 : 1e3;
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
  for (let time = Math.ceil(scale.from / step) * step; time <= scale.to; time += step) {
    const x = toX(time);
    g.fillStyle = ink.line;
    g.fillRect(x, BAND + 16, 1, bottom);
    g.fillStyle = ink.soft;
    const text = `${(time / unit).toFixed(digits)} ${inSeconds ? "s" : "ms"}`;
    if (x + g.measureText(text).width / 2 < scale.width) g.fillText(text, x, BAND + 12);
  }
  g.textAlign = "left";
}

const workFills = () => [ink.useful, ink.wrongFill, ink.deadFill, ink.draft, ink.step];

function paintLane(g, lane) {
  const row = lanes[lane].rows[0], top = rowTop(lane, 0), fills = workFills();
  const width = Math.ceil(plotWidth()), bins = Math.ceil(width / 4);
  g.globalAlpha = chosen.journey >= 0 ? FADED : 1;
  if (crowd(row, scale.from, scale.to) > 2 * width) {
    heap(g, columnsOf(row, scale.from, toTime(GUTTER + width), width).shares, 1, top, DEVICE, fills);
  } else {
    paintBlocks(g, row, width, top, fills);
  }
  paintThin(g, lane, 1, WAITS);
  paintThin(g, lane, 2, LINES);
  g.globalAlpha = 1;
  heap(g, columnsOf(row, scale.from, toTime(GUTTER + bins * 4), bins).shares, 4, stripTop(lane), STRIP, fills);
  for (const span of chosen.spans) if (spans.lane[span] === lane) paintChosen(g, span, fills);
}

function paintBlocks(g, row, width, top, fills) {
  const narrow = new Float32Array(width * WORK.length);
  const wide = [];
  touching(row, scale.from, scale.to, (span) => {
    const from = Math.max(GUTTER, toX(spans.at[span])), to = Math.min(GUTTER + width, toX(spans.until[span]));
    if (to - from < 1.5) {
      spread(narrow, from - GUTTER, to - GUTTER, workOf(span));
    } else {
      stack(g, from, top, Math.max(1, to - from - 0.5), workOf(span), fills);
      if (to - from > 26) wide.push(span);
    }
  });
  heap(g, narrow, 1, top, DEVICE, fills);
  for (const span of wide) label(g, span, top);
}

// Adds a stretch [from, to] in pixels to the columns it covers.
function spread(columns, from, to, parts) {
  const count = WORK.length, last = columns.length / count - 1;
  for (let column = Math.max(0, Math.floor(from)); column <= Math.min(last, to); column++) {
    const share = Math.min(to, column + 1) - Math.max(from, column);
    for (let part = 0; part < count; part++) columns[column * count + part] += share * parts[part];
  }
}

// A block. The share of useful rows is often a sliver and what one looks for: it never vanishes.
function stack(g, x, top, width, parts, fills) {
  const useful = parts[0] > 0 ? Math.max(parts[0], 2 / DEVICE) : 0;
  const rest = parts[0] < 1 ? (1 - useful) / (1 - parts[0]) : 0;
  let bottom = top + DEVICE;
  for (let part = 0; part < parts.length; part++) {
    const size = (part ? parts[part] * rest : useful) * DEVICE;
    if (!size) continue;
    g.fillStyle = fills[part];
    g.fillRect(x, bottom - size, width, size);
    bottom -= size;
  }
}

// Columns of `step` pixels as stacked areas, one outline a part: their height is the share of time.
function heap(g, shares, step, top, height, fills) {
  const parts = fills.length, count = shares.length / parts, floor = new Float32Array(count);
  const y = (share) => top + height * (1 - Math.min(1, share));
  for (let part = 0; part < parts; part++) {
    const ceiling = (column) => floor[column] + shares[column * parts + part];
    let start = -1, any = false;
    g.beginPath();
    for (let column = 0; column <= count; column++) {
      const some = column < count && shares[column * parts + part] > 0.002;
      if (some && start < 0) start = column;
      if (some || start < 0) continue;
      g.moveTo(GUTTER + start * step, y(floor[start]));
      for (let c = start; c < column; c++) {
        g.lineTo(GUTTER + c * step, y(ceiling(c)));
        g.lineTo(GUTTER + (c + 1) * step, y(ceiling(c)));
      }
      for (let c = column - 1; c >= start; c--) {
        g.lineTo(GUTTER + (c + 1) * step, y(floor[c]));
        g.lineTo(GUTTER + c * step, y(floor[c]));
      }
      start = -1;
      any = true;
    }
    if (any) { g.fillStyle = fills[part]; g.fill(); }
    for (let column = 0; column < count; column++) floor[column] += shares[column * parts + part];
  }
}

function label(g, span, top) {
  const from = Math.max(GUTTER, toX(spans.at[span])), to = toX(spans.until[span]);
  const kind = model.kinds[spans.kind[span]];
  const text = kind === "compute" ? `${spans.segment[span]}` : kind;
  const width = g.measureText(text).width;
  if (width > to - from - 8) return;
  g.fillStyle = ink.panel;
  g.fillRect(from + 3, top + 3, width + 4, 13);
  g.fillStyle = ink.ink;
  g.fillText(text, from + 5, top + 13);
}

// Waits, the network and the node's own steps: thin rows, where neighbours in a pixel are one.
function paintThin(g, lane, number, kinds) {
  const row = lanes[lane].rows[number], top = rowTop(lane, number), height = rowHeight(number);
  const fills = thinFills(), width = Math.ceil(plotWidth());
  if (crowd(row, scale.from, scale.to) > 2 * width) {
    const ruling = rulers(row, columnsOf(row, scale.from, toTime(GUTTER + width), width), kinds);
    for (let from = 0, to = 0; from < width; from = to) {
      while (to < width && ruling[to] === ruling[from]) to++;
      if (ruling[from] < 0) continue;
      g.fillStyle = fills[kinds[ruling[from]]];
      g.fillRect(GUTTER + from, top, to - from, height);
    }
    return;
  }
  let drawnTo = -1, drawnKind = -1;
  touching(row, scale.from, scale.to, (span) => {
    const from = toX(spans.at[span]), to = Math.max(from + 1, toX(spans.until[span])), kind = spans.kind[span];
    if (kind === drawnKind && to <= drawnTo) return;
    g.fillStyle = fills[model.kinds[kind]];
    g.fillRect(from, top, to - from, height);
    drawnTo = to;
    drawnKind = kind;
  });
}

// Which kind has most of each column; -1 where there is nothing. What took no time counts where it
// is alone.
function rulers(row, { shares, begun }, kinds) {
  const ruling = new Int8Array(begun.length - 1).fill(-1);
  for (let column = 0; column < ruling.length; column++) {
    let most = 0;
    for (let part = 0; part < row.count; part++) {
      const share = shares[column * row.count + part];
      if (share > most) { most = share; ruling[column] = part; }
    }
    if (most > 0 || begun[column + 1] === begun[column]) continue;
    ruling[column] = kinds.indexOf(model.kinds[spans.kind[row.list[begun[column + 1] - 1]]]);
  }
  return ruling;
}

function paintChosen(g, span, fills) {
  const row = ROW_OF[spans.kind[span]], top = rowTop(spans.lane[span], row);
  const from = toX(spans.at[span]), to = Math.max(from + 1, toX(spans.until[span]));
  if (to < GUTTER || from > scale.width) return;
  if (row) {
    g.fillStyle = thinFills()[model.kinds[spans.kind[span]]];
    g.fillRect(from, top, to - from, rowHeight(row));
  } else {
    g.fillStyle = ink.lane;
    g.fillRect(from, top, to - from, DEVICE);
    stack(g, from, top, Math.max(1, to - from - 0.5), workOf(span), fills);
    label(g, span, top);
  }
}
