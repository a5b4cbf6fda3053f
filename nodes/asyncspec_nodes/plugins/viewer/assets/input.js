// Mouse, fingers and keys.
const at = (event) => {
  const box = view.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

view.addEventListener("wheel", (event) => {
  const [x] = at(event);
  // Over the names of the devices the wheel moves the page.
  if (x < GUTTER) return;
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    pan((event.deltaX || event.deltaY) / plotWidth());
  } else {
    zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.004), toTime(x));
  }
  redraw();
}, { passive: false });

const fingers = new Map();
let moved = 0;
view.addEventListener("pointerdown", (event) => {
  view.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, event.clientX);
  moved = 0;
});
view.addEventListener("pointermove", (event) => {
  if (!fingers.has(event.pointerId)) { hover(...at(event)); return; }
  const before = [...fingers.values()], shift = event.clientX - fingers.get(event.pointerId);
  fingers.set(event.pointerId, event.clientX);
  moved += Math.abs(shift);
  view.classList.toggle("grabbing", moved > 4);
  tip.hidden = true;
  if (fingers.size === 2) {
    const after = [...fingers.values()], spread = (pair) => Math.max(20, Math.abs(pair[0] - pair[1]));
    const left = view.getBoundingClientRect().left;
    zoom(spread(before) / spread(after), toTime((after[0] + after[1]) / 2 - left));
  } else {
    pan(-shift / plotWidth());
  }
  redraw();
});
for (const kind of ["pointerup", "pointercancel"]) {
  view.addEventListener(kind, (event) => {
    fingers.delete(event.pointerId);
    view.classList.remove("grabbing");
    if (kind === "pointerup" && moved <= 4) {
      const [x, y] = at(event), span = spanAt(x, y), round = x < GUTTER ? -1 : roundAt(x, y);
      if (round < 0) { choose(span < 0 ? -1 : spans.lifetime[span]); return; }
      const room = (rounds.until[round] - rounds.at[round]) * 0.05;
      show(rounds.at[round] - room, rounds.until[round] + room);
      chooseRound(round);
    }
  });
}
view.addEventListener("pointerleave", () => { tip.hidden = true; });
view.addEventListener("dblclick", (event) => { zoom(0.3, toTime(at(event)[0])); redraw(); });

map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); jump(event); });
map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
function jump(event) {
  const box = map.getBoundingClientRect(), half = (scale.to - scale.from) / 2;
  const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - 8);
  const time = share * (model.duration + 2 * MARGIN) - MARGIN;
  show(time - half, time + half);
  redraw();
}

strip.addEventListener("click", (event) => {
  const token = event.target.dataset?.token;
  if (token !== undefined) chooseToken(Number(token));
});
strip.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  chooseToken(Math.min(tokens.at.length - 1, Math.max(0, chosen.token + step)));
});

function all() { show(-MARGIN, model.duration + MARGIN); redraw(); }
function help() {
  const keys = document.getElementById("keys");
  keys.hidden = !keys.hidden;
  document.getElementById("help").setAttribute("aria-expanded", String(!keys.hidden));
}
const inside = (action) => () => { action(); redraw(); };
const KEYS = {
  ArrowLeft: inside(() => pan(-0.15)), ArrowRight: inside(() => pan(0.15)),
  ArrowUp: inside(() => zoom(0.7)), ArrowDown: inside(() => zoom(1 / 0.7)),
  "+": inside(() => zoom(0.5)), "=": inside(() => zoom(0.5)), "-": inside(() => zoom(2)),
  0: all, Home: all, Escape: () => { tip.hidden = true; choose(-1); }, "?": help,
  n: () => stepSegment(1), p: () => stepSegment(-1), m: () => stepMiss(1), M: () => stepMiss(-1),
  t: () => chooseToken(chosen.token + 1), T: () => chooseToken(Math.max(0, chosen.token - 1)),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
document.getElementById("in").addEventListener("click", KEYS["+"]);
document.getElementById("out").addEventListener("click", KEYS["-"]);
document.getElementById("fit").addEventListener("click", all);
document.getElementById("help").addEventListener("click", help);
