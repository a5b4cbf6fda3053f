// Colours (Okabe and Ito's, told apart by the colour-blind) and patterns (told apart by anybody).
const ink = {};
const NAMES = ["paper", "ink", "soft", "line", "panel", "lane", "useful", "wrong", "dead", "draft",
  "queue", "credit", "send", "step", "focus"];

function readInk() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) ink[name] = style.getPropertyValue(`--${name}`).trim();
  const probe = document.createElement("canvas").getContext("2d");
  ink.deadFill = pattern(probe, ink.dead, (g) => {
    g.moveTo(-2, 2); g.lineTo(2, -2); g.moveTo(0, 8); g.lineTo(8, 0); g.moveTo(6, 10); g.lineTo(10, 6);
  });
  ink.wrongFill = pattern(probe, ink.wrong, (g) => { g.moveTo(0, 4); g.lineTo(8, 4); });
  ink.sendFill = pattern(probe, ink.send, (g) => { g.moveTo(0, 0); g.lineTo(8, 8); });
  ink.queueFill = pattern(probe, ink.queue, (g) => { g.moveTo(4, 0); g.lineTo(4, 8); });
}

function pattern(target, colour, draw) {
  const size = 8, tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const g = tile.getContext("2d");
  g.fillStyle = colour;
  g.fillRect(0, 0, size, size);
  g.strokeStyle = ink.panel;
  g.globalAlpha = 0.55;
  g.lineWidth = 1.6;
  g.beginPath();
  draw(g);
  g.stroke();
  return target.createPattern(tile, "repeat");
}

const thinFills = () => ({
  queue: ink.queueFill, credit: ink.credit, send: ink.sendFill, transfer: ink.send, step: ink.step,
  silence: ink.dead,
});

const FILLS = () => [
  [ink.useful, "useful rows"], [ink.wrongFill, "wrong guesses"], [ink.deadFill, "dead rows"],
  [ink.draft, "drafting"], [ink.queueFill, "waits for the device"], [ink.credit, "waits for credit"],
  [ink.send, "on its way"], [ink.sendFill, "waits for the network"], [ink.step, "own steps, cache"],
  [(g) => { g.fillStyle = markInk(PRUNE); drawMark(g, PRUNE, 8, 6); }, "prune"],
  [(g) => { g.fillStyle = ink.dead; g.font = "13px system-ui, sans-serif"; g.fillText("×", 4, 11); }, "miss"],
  [(g) => { g.fillStyle = markInk("joined"); drawMark(g, "joined", 8, 6); }, "other events"],
];

function legend() {
  const list = document.getElementById("legend"), ratio = window.devicePixelRatio || 1;
  list.replaceChildren();
  for (const [fill, text] of FILLS()) {
    const item = document.createElement("li"), swatch = document.createElement("canvas");
    swatch.width = 16 * ratio; swatch.height = 12 * ratio;
    const g = swatch.getContext("2d");
    g.scale(ratio, ratio);
    if (typeof fill === "function") fill(g); else { g.fillStyle = fill; g.fillRect(0, 0, 16, 12); }
    item.append(swatch, text);
    list.append(item);
  }
}
