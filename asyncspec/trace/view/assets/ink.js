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

const FILLS = () => [
  ["useful", ink.useful, "useful rows"],
  ["wrong", ink.wrongFill, "wrong guesses"],
  ["dead", ink.deadFill, "dead rows"],
  ["draft", ink.draft, "drafting"],
  ["queue", ink.queueFill, "waits for the device"],
  ["credit", ink.credit, "waits for credit"],
  ["transfer", ink.send, "on its way"],
  ["send", ink.sendFill, "waits for the network"],
  ["step", ink.step, "the node's own steps, cache"],
];

function legend() {
  const list = document.getElementById("legend");
  list.replaceChildren();
  for (const [name, fill, text] of FILLS()) {
    const item = document.createElement("li"), swatch = document.createElement("canvas");
    swatch.width = 16; swatch.height = 12;
    const g = swatch.getContext("2d");
    g.fillStyle = fill;
    g.fillRect(0, 0, 16, 12);
    item.dataset.kind = name;
    item.append(swatch, text);
    list.append(item);
  }
}
