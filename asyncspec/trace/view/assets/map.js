// The whole run, all devices together, and the window on it. Drawn once a size, then copied.
const map = document.getElementById("map"), MAP = 40;
let mapImage = null;

function paintMap() {
  const width = map.clientWidth, g = fit(map, MAP);
  if (!mapImage || mapImage.clientWidth !== width || mapImage.ratio !== map.width) mapImage = drawMap(width);
  g.drawImage(mapImage.canvas, 0, 0, width, MAP);
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

function drawMap(width) {
  const canvas = document.createElement("canvas"), g = canvas.getContext("2d");
  canvas.width = map.width;
  canvas.height = map.height;
  g.scale(map.width / width, map.height / MAP);
  const bins = Math.max(1, Math.floor(plotWidth() / 2)), sums = new Float32Array(bins * WORK.length);
  for (const { rows } of lanes) {
    const { shares } = columnsOf(rows[0], -MARGIN, model.duration + MARGIN, bins);
    for (let i = 0; i < sums.length; i++) sums[i] += shares[i] / lanes.length;
  }
  heap(g, sums, plotWidth() / bins, 3, MAP - 6, workFills());
  return { canvas, clientWidth: width, ratio: map.width };
}
