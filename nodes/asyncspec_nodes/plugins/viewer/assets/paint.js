// One frame: what stands still, the lanes, and what lies over them.
const view = document.getElementById("view");
const painted = { frames: 0, lastFrameMs: 0 };
const chosen = { lifetime: -1, token: -1, round: -1, spans: [] };

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
  work.spans = work.columns = work.marks = 0;
  const g = fit(view, canvasHeight());
  paintGrid(g);
  g.save();
  g.beginPath();
  g.rect(GUTTER, 0, plotWidth(), canvasHeight());
  g.clip();
  paintRounds(g);
  const named = paintLanes(g);
  const inFront = new Set(chosen.spans);
  g.globalAlpha = chosen.lifetime >= 0 ? FADED : 1;
  for (const span of named) if (!inFront.has(span)) label(g, span);
  g.globalAlpha = 1;
  paintMisses(g);
  paintMarks(g);
  if (chosen.lifetime >= 0) paintLifetime(g, chosen.lifetime);
  for (const span of named) if (inFront.has(span)) label(g, span);
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
