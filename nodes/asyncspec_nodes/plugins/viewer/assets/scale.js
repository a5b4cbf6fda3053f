// The visible window in microseconds, and where things are on the canvas.
const GUTTER = 104, ROUND = 15, BAND = 4 + ROUND * roundRows.length, AXIS = 32, TOP = BAND + AXIS;
// Many devices get thinner lanes, so that they are seen together.
const [DEVICE, WAIT, LINE, STRIP, GAP] = lanes.length > 6 ? [22, 6, 5, 10, 10] : [30, 8, 6, 16, 14];
const LANE = DEVICE + 3 + WAIT + 2 + LINE + 5 + STRIP + GAP;
const NARROWEST = 20;

const MARGIN = Math.max(20, model.duration * 0.01);
const scale = { from: -MARGIN, to: model.duration + MARGIN, width: 800 };

const plotWidth = () => Math.max(50, scale.width - GUTTER - 8);
const toX = (time) => GUTTER + ((time - scale.from) / (scale.to - scale.from)) * plotWidth();
const toTime = (x) => scale.from + ((x - GUTTER) / plotWidth()) * (scale.to - scale.from);
const laneTop = (lane) => TOP + 6 + lane * LANE;
const canvasHeight = () => TOP + 6 + lanes.length * LANE;
const rowTop = (lane, row) =>
  laneTop(lane) + [0, DEVICE + 3, DEVICE + 3 + WAIT + 2][row];
const rowHeight = (row) => [DEVICE, WAIT, LINE][row];
const stripTop = (lane) => rowTop(lane, 2) + LINE + 5;

function show(from, to) {
  const whole = model.duration + 2 * MARGIN;
  const span = Math.min(whole, Math.max(NARROWEST, to - from));
  const middle = (from + to) / 2;
  scale.from = Math.min(Math.max(-MARGIN, middle - span / 2), model.duration + MARGIN - span);
  scale.to = scale.from + span;
}

function zoom(factor, time = (scale.from + scale.to) / 2) {
  // The moment under the cursor stays where it is.
  const share = (time - scale.from) / (scale.to - scale.from);
  const whole = model.duration + 2 * MARGIN;
  const span = Math.min(whole, Math.max(NARROWEST, (scale.to - scale.from) * factor));
  const from = time - share * span;
  show(from, from + span);
}

function pan(share) {
  const shift = share * (scale.to - scale.from);
  show(scale.from + shift, scale.to + shift);
}

// Bring a stretch of time into view, with room around it; stay where it is in view already.
function reveal(from, to) {
  const span = scale.to - scale.from;
  if (from >= scale.from + span * 0.05 && to <= scale.to - span * 0.05 && to - from > span * 0.05) return;
  const wanted = Math.max((to - from) * 2.5, 2000);
  const middle = (from + to) / 2;
  show(middle - wanted / 2, middle + wanted / 2);
}

// Round distances between ticks: 1, 2 or 5 times a power of ten.
function tickStep() {
  const rough = (scale.to - scale.from) / Math.max(2, plotWidth() / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough);
}
