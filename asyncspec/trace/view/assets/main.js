// Choosing, moving, and keys.
function choose(journey, token = -1) {
  chosen.journey = journey;
  chosen.token = token >= 0 ? token : (broughtBy.get(journey)?.[0] ?? -1);
  if (journey >= 0) {
    const moments = [journeys.sent[journey], journeys.judged[journey],
      ...journeys.hops[journey].flatMap((hop) => hop.slice(1))].filter((time) => time >= 0);
    reveal(Math.min(...moments), Math.max(...moments));
  }
  const hash = token >= 0 ? `#token-${token}` : journey >= 0 ? `#segment-${journey}` : "#";
  history.replaceState(null, "", hash);
  markTokens();
  showSelection();
  redraw();
}

function chooseToken(token) {
  if (token < 0 || token >= tokens.at.length) return;
  choose(tokens.journey[token], token);
}

function stepSegment(step) {
  const count = journeys.sent.length;
  if (!count) return;
  // From nothing, the first segment in view.
  const first = journeys.sent.findIndex((time) => time >= scale.from);
  const next = chosen.journey < 0 ? Math.max(0, first) : chosen.journey + step;
  choose(Math.min(count - 1, Math.max(0, next)));
}

function stepMiss(step) {
  const middle = (scale.from + scale.to) / 2, near = (scale.to - scale.from) / 1000;
  const ahead = misses.filter((time) => (step > 0 ? time > middle + near : time < middle - near));
  if (!ahead.length) return;
  const target = step > 0 ? ahead[0] : ahead[ahead.length - 1], half = (scale.to - scale.from) / 2;
  show(target - half, target + half);
  redraw();
}

function spanAt(x, y) {
  if (x < GUTTER) return -1;
  const lane = Math.floor((y - laneTop(0)) / LANE);
  if (!lanes[lane]) return -1;
  const row = [0, 1, 2].find((r) => y >= rowTop(lane, r) - 1 && y <= rowTop(lane, r) + rowHeight(r) + 1);
  if (row === undefined) return -1;
  const slack = 2 * (scale.to - scale.from) / plotWidth(), time = toTime(x);
  let found = -1, nearest = Infinity;
  touching(lanes[lane].rows[row], time - slack, time + slack, (span) => {
    const distance = Math.max(spans.at[span] - time, time - spans.until[span], 0);
    if (distance <= nearest) { nearest = distance; found = span; }
  });
  return found;
}

const tip = document.getElementById("tip");
function hover(x, y) {
  const span = spanAt(x, y);
  tip.hidden = span < 0;
  view.style.cursor = span >= 0 && spans.journey[span] >= 0 ? "pointer" : "";
  if (span < 0) return;
  tip.textContent = describeSpan(span);
  const right = x + 14 + tip.offsetWidth > view.clientWidth;
  tip.style.left = `${right ? x - 14 - tip.offsetWidth : x + 14}px`;
  tip.style.top = `${Math.min(y + 14, canvasHeight() - tip.offsetHeight)}px`;
}

const at = (event) => {
  const box = view.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const [x] = at(event);
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
      const span = spanAt(...at(event));
      choose(span < 0 ? -1 : spans.journey[span]);
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
  0: all, Home: all, Escape: () => choose(-1), "?": help,
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

function dress() { readInk(); legend(); redraw(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
new ResizeObserver(redraw).observe(view);

function fromHash() {
  const [, kind, number] = /^#(token|segment)-(\d+)$/.exec(location.hash) ?? [];
  if (kind === "token") chooseToken(Number(number));
  if (kind === "segment" && journeys.sent[number] !== undefined) choose(Number(number));
}

dress();
showSummary();
showTokens();
showSelection();
fromHash();
// For tests, and for whoever scripts the page.
window.asyncspecTrace = { model, scale, chosen, painted, choose, chooseToken, show, redraw, toX, toTime, rowTop, rowHeight };
