// The page comes up.
function dress() { readInk(); legend(); mapImage = null; redraw(); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
new ResizeObserver(redraw).observe(view);

function fromHash() {
  const [, kind, number] = /^#(token|segment)=(\d+)$/.exec(location.hash) ?? [];
  if (kind === "token") chooseToken(Number(number));
  if (kind === "segment" && lifetimes.sent[number] !== undefined) choose(Number(number));
}

dress();
showSummary();
showTokens();
showSelection();
fromHash();
window.addEventListener("hashchange", fromHash);

// For tests, and for whoever scripts the page.
window.asyncspecTrace = {
  model, scale, lanes, show, redraw, toX, toTime, rowTop, rowHeight, markTop, columnsOf,
  get work() { return { ...work }; },
  get frames() { return painted.frames; },
  get lastFrameMs() { return painted.lastFrameMs; },
  get state() {
    const { lifetime, token, round } = chosen;
    return { lifetime, token, round, from: scale.from, to: scale.to };
  },
  select({ lifetime = -1, token = -1 } = {}) { if (token >= 0) chooseToken(token); else choose(lifetime); },
};
