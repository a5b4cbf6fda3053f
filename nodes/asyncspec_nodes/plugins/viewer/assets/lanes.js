// What devices did, as pixels: where a row has more spans than the window has columns, columns come
// from the row's sums at once; else each span has its own. Bins of time stay where they are while
// the window moves, so nothing flickers.
let picture = null;

// A column a pixel.
const EACH = { size: 1, offset: 0 };

// Stretches of time `size` pixels wide; the first begins `offset` pixels left of the window.
function binsOf(width, size) {
  const step = ((scale.to - scale.from) * size) / width, first = Math.floor(scale.from / step);
  const count = Math.floor(scale.to / step) - first + 1;
  return { size, count, from: first * step, to: (first + count) * step, offset: (scale.from / step - first) * size };
}

// Returns the spans that are wide enough for a name.
function paintLanes(g) {
  const ratio = window.devicePixelRatio || 1, height = canvasHeight() - TOP;
  const fits = picture?.ratio === ratio && picture.width === Math.round(plotWidth() * ratio);
  if (!fits) picture = new Pixels(plotWidth(), height, ratio);
  picture.clear();
  picture.phase = Math.round((scale.from / (scale.to - scale.from)) * picture.width);
  const wide = lanes.flatMap((_, lane) => paintLane(lane));
  picture.draw(g, GUTTER, TOP);
  return wide;
}

function paintLane(lane) {
  const { rows } = lanes[lane], wide = [];
  const around = chosen.lifetime >= 0 ? ink.faded : ink.textures;
  paintDevice(lane, rows[0], around, wide);
  paintThin(lane, 1, around);
  paintThin(lane, 2, around);
  heapOf(rows[0], 4, stripTop(lane) - TOP, STRIP, WORK.map((part) => ink.textures[part]));
  paintChosen(lane);
  return wide;
}

// A row's sums, in columns of `size` pixels of the page.
function heapOf(row, size, top, height, textures) {
  const bins = binsOf(picture.width, Math.round(size * picture.ratio));
  picture.heap(columnsOf(row, bins.from, bins.to, bins.count), bins, top, height, textures);
}

function paintDevice(lane, row, inks, wide) {
  const textures = WORK.map((part) => inks[part]), top = rowTop(lane, 0) - TOP;
  if (crowd(row, scale.from, scale.to) > picture.width) {
    heapOf(row, 2, top, DEVICE, textures);
    return;
  }
  const shares = new Float32Array(picture.width * WORK.length);
  touching(row, scale.from, scale.to, (span) => {
    const [from, to] = extent(span);
    if (to - from < 1.5) spread(shares, from, to, workOf(span)); else block(shares, from, to, workOf(span));
    if (to - from > 26 * picture.ratio) wide.push(span);
  });
  picture.heap(shares, EACH, top, DEVICE, textures, 2);
}

// Where a span lies, in pixels of the picture.
function extent(span) {
  const scaled = (time) => ((time - scale.from) / (scale.to - scale.from)) * picture.width;
  return [scaled(spans.at[span]), scaled(spans.until[span])];
}

// Adds a stretch of less than two pixels to the columns it covers.
function spread(shares, from, to, parts) {
  const last = picture.width - 1;
  for (let x = Math.max(0, Math.floor(from)); x <= Math.min(last, to); x++) {
    const share = Math.min(to, x + 1) - Math.max(from, x);
    for (let part = 0; part < parts.length; part++) shares[x * parts.length + part] += share * parts[part];
  }
}

// A block, with a gap before what follows it.
function block(shares, from, to, parts) {
  const end = Math.round(to) - (to - from > 5 ? 1 : 0);
  for (let x = Math.max(0, Math.round(from)); x < Math.min(picture.width, end); x++) shares.set(parts, x * parts.length);
}

// Waits, the network and the node's own steps, in thin rows. What takes no time has its pixel too.
function paintThin(lane, number, inks) {
  const row = lanes[lane].rows[number], kinds = THIN[number];
  const place = [rowTop(lane, number) - TOP, rowHeight(number), kinds.map((kind) => inks[kind])];
  if (crowd(row, scale.from, scale.to) > picture.width) {
    heapOf(row, 2, ...place);
    return;
  }
  const ruling = new Int8Array(picture.width).fill(-1);
  touching(row, scale.from, scale.to, (span) => rule(ruling, span, kinds));
  picture.line(ruling, ...place);
}

function rule(ruling, span, kinds) {
  const [from, to] = extent(span), start = Math.floor(from);
  ruling.fill(kinds.indexOf(model.kinds[spans.kind[span]]), Math.max(0, start), Math.max(0, start + 1, Math.round(to)));
}

// The chosen segment's own spans, in full colour over the faded rest.
function paintChosen(lane) {
  const rulings = THIN.map((kinds) => kinds && new Int8Array(picture.width).fill(-1));
  const shares = new Float32Array(picture.width * WORK.length);
  let any = false;
  for (const span of chosen.spans) {
    const [from, to] = extent(span), row = ROW_OF[spans.kind[span]];
    if (spans.lane[span] !== lane || to < 0 || from > picture.width) continue;
    any = true;
    if (row) rule(rulings[row], span, THIN[row]);
    else block(shares, Math.floor(from), Math.max(to, Math.floor(from) + 1), workOf(span));
  }
  if (!any) return;
  const full = (kind) => ink.textures[kind];
  picture.heap(shares, EACH, rowTop(lane, 0) - TOP, DEVICE, WORK.map(full), 2);
  for (const row of [1, 2]) picture.line(rulings[row], rowTop(lane, row) - TOP, rowHeight(row), THIN[row].map(full));
}

// A segment's number, or what else the device does.
function label(g, span) {
  const from = Math.max(GUTTER, toX(spans.at[span])), to = toX(spans.until[span]), top = rowTop(spans.lane[span], 0);
  const kind = model.kinds[spans.kind[span]];
  const text = kind === "compute" ? `${spans.segment[span]}` : kind;
  const width = g.measureText(text).width;
  if (width > to - from - 8) return;
  g.fillStyle = ink.panel;
  g.fillRect(from + 3, top + 3, width + 4, 13);
  g.fillStyle = ink.ink;
  g.fillText(text, from + 5, top + 13);
}
