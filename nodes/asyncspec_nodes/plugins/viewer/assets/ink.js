// Colours (Okabe and Ito's, told apart by the colour-blind) and textures (told apart by anybody).
const ink = {};
const NAMES = ["paper", "ink", "soft", "line", "panel", "lane", "useful", "wrong", "dead", "draft",
  "queue", "credit", "send", "step", "focus"];
const FADED = 0.28;

function readInk() {
  const style = getComputedStyle(document.documentElement);
  const g = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  NAMES.forEach((name, i) => {
    g.fillStyle = ink[name] = style.getPropertyValue(`--${name}`).trim();
    g.fillRect(i, 0, 1, 1);
  });
  const { data } = g.getImageData(0, 0, NAMES.length, 1);
  const rgb = (name) => data.subarray(4 * NAMES.indexOf(name), 4 * NAMES.indexOf(name) + 3);
  const plain = (name) => texture(rgb(name), rgb("panel"), () => false);
  ink.textures = {
    useful: plain("useful"), draft: plain("draft"),
    cache: texture(rgb("step"), rgb("panel"), (x, y) => (y & 3) === 1),
    wrong: texture(rgb("wrong"), rgb("panel"), (x, y) => (x & 3) < 1 && (y & 7) === ((x & 4) ? 5 : 1)),
    dead: texture(rgb("dead"), rgb("panel"), (x, y) => ((x + y) & 7) < 2),
    unknown: texture(rgb("step"), rgb("panel"), (x, y) => (x & 3) < 2 && (y & 3) < 2),
    queue: texture(rgb("queue"), rgb("panel"), (x) => (x & 7) === 4),
    send: texture(rgb("send"), rgb("panel"), (x, y) => ((x - y) & 3) === 0),
    credit: plain("credit"), transfer: plain("send"), step: plain("step"), silence: plain("dead"),
  };
  ink.faded = {};
  for (const [name, words] of Object.entries(ink.textures)) {
    ink.faded[name] = words.map((word) => (word & 0xffffff) | (Math.round(255 * FADED) << 24));
  }
}

// Eight by eight pixels, repeated: a colour, lightened where `light(x, y)` says so. Each is one
// number, red in its lowest byte.
function texture(colour, paper, light) {
  return Uint32Array.from({ length: 64 }, (_, i) => {
    const share = light(i & 7, i >> 3) ? 0.6 : 0;
    const [red, green, blue] = [0, 1, 2].map((c) => Math.round(colour[c] + (paper[c] - colour[c]) * share));
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

// The other three, of rows that are useful, wrong and dead, stand in the page's first sentence.
const LEGEND = [
  ["unknown", "use not recorded"], ["draft", "drafting"],
  ["queue", "waits for the device"], ["credit", "waits for credit"], ["transfer", "on its way"],
  ["send", "waits for the network"], ["step", "own steps"], ["cache", "cache"],
  [(g) => { g.fillStyle = markInk(PRUNE); drawMark(g, PRUNE, 8, 6); }, "prune"],
  [(g) => { g.fillStyle = ink.dead; g.font = "13px system-ui, sans-serif"; g.fillText("×", 4, 11); }, "miss"],
  [(g) => { g.fillStyle = markInk("joined"); drawMark(g, "joined", 8, 6); }, "other events"],
];

function legend() {
  const list = document.getElementById("legend"), ratio = window.devicePixelRatio || 1;
  list.replaceChildren();
  for (const [what, text] of LEGEND) {
    if (what === "unknown" && !spans.useful.some((useful) => useful < 0)) continue;
    const item = document.createElement("li");
    item.append(swatchOf(what, ratio), text);
    list.append(item);
  }
  for (const place of document.querySelectorAll("[data-swatch]")) {
    place.replaceChildren(swatchOf(place.dataset.swatch, ratio));
  }
}

function swatchOf(what, ratio) {
  const swatch = document.createElement("canvas");
  swatch.width = 16 * ratio; swatch.height = 12 * ratio;
  const g = swatch.getContext("2d");
  g.scale(ratio, ratio);
  if (typeof what === "function") what(g); else drawSwatch(g, ink.textures[what], ratio);
  return swatch;
}

function drawSwatch(g, words, ratio) {
  const pixels = new Pixels(16, 12, ratio);
  pixels.line(new Int8Array(pixels.width), 0, 12, [words]);
  pixels.draw(g, 0, 0);
}
