// Below an answer: a bar for each pass of the cluster, as high as the tokens that it brought. Walking
// along them lights the words of that pass.
import { element } from "./render.js";

const MOST = 120;

const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

export class Passes {
  // `text`: the element with the answer's words.
  constructor(text) {
    this.text = text;
    this.chosen = -1;
    this.sum = element("p", "sum");
    this.bars = element("div", "bars");
    this.caption = element("p", "caption");
    this.bars.tabIndex = 0;
    this.bars.setAttribute("role", "slider");
    this.bars.setAttribute("aria-label", "Passes of this answer; arrow keys light the words of each");
    this.bars.setAttribute("aria-valuemin", "1");
    this.bars.addEventListener("keydown", (event) => this.key(event));
    this.bars.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    this.bars.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    this.bars.addEventListener("pointerleave", () => this.choose(-1));
    this.bars.addEventListener("blur", () => this.choose(-1));
    text.addEventListener("pointerover", (event) => {
      const pass = event.target.closest?.("[data-pass]")?.dataset.pass;
      this.choose(pass === undefined ? -1 : Math.floor(pass / this.step));
    });
    text.addEventListener("pointerleave", () => this.choose(-1));
    this.node = element("div", "passes", this.sum, this.bars, this.caption);
    this.node.hidden = true;
  }

  // `passes` as of `Text`; `stats` once the answer is complete.
  show(source, passes, stats) {
    this.source = source;
    this.passes = passes;
    this.node.hidden = passes.length === 0;
    if (!passes.length) return;
    const tokens = passes.reduce((sum, pass) => sum + pass[1], 0);
    // One bar may stand for several passes of a long answer.
    this.step = Math.ceil(passes.length / MOST);
    const bars = [];
    for (let i = 0; i < passes.length; i += this.step) {
      bars.push(Math.max(...passes.slice(i, i + this.step).map((pass) => pass[1])));
    }
    const most = Math.max(4, ...bars);
    while (this.bars.children.length > bars.length) this.bars.lastChild.remove();
    bars.forEach((height, i) => {
      const bar = this.bars.children[i] ?? this.bars.appendChild(element("i"));
      bar.className = height > 1 ? `many tint${i % 2}` : "";
      bar.style.setProperty("height", `${100 * height / most}%`);
    });
    const speed = stats?.tokens_per_second ? `, ${stats.tokens_per_second.toFixed(1)} a second` : "";
    const guessed = stats?.hit_rate ? `, ${Math.round(100 * stats.hit_rate)} % guessed ahead` : "";
    const apiece = `${(tokens / passes.length).toFixed(1)} a pass`;
    const about = stats?.plain_measured ? "" : "about ";
    const times = stats?.times_plain_rate ? `${about}${stats.times_plain_rate.toFixed(1)} times plain decoding: ` : "";
    this.sum.textContent = `${times}${count(tokens, "token")} in ${count(passes.length, "pass", "passes")} (${apiece})${speed}${guessed}`;
    this.bars.setAttribute("aria-valuemax", bars.length);
    this.update();
  }

  at(event) {
    const box = this.bars.getBoundingClientRect(), bars = this.bars.children;
    const found = [...bars].findIndex((bar) => event.clientX < bar.getBoundingClientRect().right);
    return event.clientX < box.left ? -1 : found < 0 ? bars.length - 1 : found;
  }

  key(event) {
    const last = this.bars.children.length - 1;
    const next = { ArrowRight: this.chosen + 1, ArrowUp: this.chosen + 1, ArrowLeft: this.chosen - 1, ArrowDown: this.chosen - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, next)));
  }

  choose(bar) {
    if (bar === this.chosen) return;
    const mark = (on) => {
      if (this.chosen < 0) return;
      this.bars.children[this.chosen]?.classList.toggle("lit", on);
      for (let pass = this.chosen * this.step; pass < (this.chosen + 1) * this.step; pass++) {
        for (const word of this.text.querySelectorAll(`[data-pass="${pass}"]`)) word.classList.toggle("lit", on);
      }
    };
    mark(false);
    this.chosen = bar;
    mark(true);
    this.update();
  }

  update() {
    const text = this.chosen < 0
      ? this.legend()
      : this.describe(this.chosen * this.step, Math.min(this.passes.length, (this.chosen + 1) * this.step));
    this.caption.textContent = text;
    this.bars.setAttribute("aria-valuenow", Math.max(1, this.chosen + 1));
    this.bars.setAttribute("aria-valuetext", text);
  }

  legend() {
    return this.passes.some((pass) => pass[1] > 1)
      ? "Tinted words came together: guessed ahead and confirmed in one pass. Each bar is a pass."
      : "Each pass brought one token here; the next ones begin ahead of it, on guesses. Each bar is a pass.";
  }

  describe(from, end) {
    const tokens = this.passes.slice(from, end).reduce((sum, pass) => sum + pass[1], 0);
    const words = this.source.slice(this.passes[from - 1]?.[0] ?? 0, this.passes[end - 1][0]).replace(/\s+/g, " ").trim();
    const which = end - from === 1 ? `Pass ${end}` : `Passes ${from + 1} to ${end}`;
    return `${which} of ${this.passes.length}, after ${(this.passes[from][2] / 1000).toFixed(2)} s: `
      + `${count(tokens, "token")}${words ? ` “${words.length > 80 ? `${words.slice(0, 79)}…` : words}”` : ", no word of the answer"}`;
  }
}
