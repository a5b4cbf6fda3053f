// The whole run, all devices together, and the window on it. Drawn once a size, then copied.
const map = document.getElementById("map"), MAP = 40;
let mapImage = null;

function paintMap() {
  const width = map.clientWidth, g = fit(map, MAP), ratio = window.devicePixelRatio || 1;
  if (mapImage?.width !== Math.round(plotWidth() * ratio) || mapImage.ratio !== ratio) mapImage = drawMap(ratio);
  mapImage.draw(g, GUTTER, 3);
  g.fillStyle = ink.soft;
  g.fillText("whole run", 12, 24);
  const share = (time) => GUTTER + ((time + MARGIN) / (model.duration + 2 * MARGIN)) * plotWidth();
  const from = share(scale.from), to = share(scale.to);
  g.fillStyle = ink.paper;
  g.globalAlpha = 0.6;
  g.fillRect(GUTTER, 0, from - GUTTER, MAP);
  g.fillRect(to, 0, width - to, MAP);
  g.globalAlpha = 1;
  g.strokeStyle = ink.focus;
  g.lineWidth = 2;
  g.strokeRect(from, 1, Math.max(3, to - from), MAP - 2);
  g.lineWidth = 1;
}

function drawMap(ratio) {
  const whole = new Pixels(plotWidth(), MAP - 6, ratio);
  const count = Math.max(1, Math.floor(plotWidth() / 2)), sums = new Float32Array(count * WORK.length);
  for (const { rows } of lanes) {
    const shares = columnsOf(rows[0], -MARGIN, model.duration + MARGIN, count);
    for (let i = 0; i < sums.length; i++) sums[i] += shares[i] / lanes.length;
  }
  const bins = { size: whole.width / count, offset: 0 };
  whole.heap(sums, bins, 0, MAP - 6, WORK.map((part) => ink.textures[part]));
  return whole;
}
