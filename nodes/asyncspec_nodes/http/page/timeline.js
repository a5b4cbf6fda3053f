// The last minute: a lane for each node, the darker the busier, and the tokens of the answers below.

const SECONDS = 60;
const LEFT = 48;

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.names = [];
    this.looks = [];
    this.came = [];
    const redraw = () => this.draw();
    new ResizeObserver(redraw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  shares(names, shares) {
    this.names = names;
    this.looks.push({ at: performance.now(), shares });
    this.draw();
  }

  tokens(count) { this.came.push({ at: performance.now(), count }); }

  draw() {
    const { canvas } = this, ratio = devicePixelRatio, now = performance.now();
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const colour = (property) => style.getPropertyValue(property);
    this.looks = this.looks.filter((look) => now - look.at < 1000 * (SECONDS + 2));
    this.came = this.came.filter((token) => now - token.at < 1000 * SECONDS);
    const lanes = this.names.length + 1, step = height / lanes;
    const x = (at) => width - (now - at) / 1000 / SECONDS * (width - LEFT);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    [...this.names, "tokens"].forEach((name, lane) => {
      g.fillStyle = colour("--quiet");
      g.fillText(name, 0, (lane + .5) * step, LEFT - 4);
      g.fillStyle = colour("--back");
      g.fillRect(LEFT, lane * step + 1, width - LEFT, step - 2);
    });
    g.fillStyle = colour("--accent");
    this.looks.forEach((look, i) => {
      if (!i) return;
      const from = Math.max(LEFT, x(this.looks[i - 1].at)), to = x(look.at);
      look.shares.forEach((share, lane) => {
        const tall = (step - 2) * share;
        g.fillRect(from, (lane + 1) * step - 1 - tall, Math.max(0, to - from), tall);
      });
    });
    for (const { at, count } of this.came) {
      const tall = Math.min(1, count / 8) * (step - 2);
      g.fillRect(Math.max(LEFT, x(at)), height - 1 - tall, 2, tall);
    }
  }
}
