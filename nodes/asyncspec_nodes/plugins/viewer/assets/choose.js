// Choosing, and what follows from it.
function choose(lifetime, token = -1) {
  chosen.lifetime = lifetime;
  chosen.round = -1;
  chosen.spans = lifetime < 0 ? [] : spansOf(lifetime);
  chosen.token = token >= 0 ? token : (emittedBy.get(lifetime)?.[0] ?? -1);
  if (lifetime >= 0) {
    const moments = [lifetimes.sent[lifetime], lifetimes.verified[lifetime],
      ...lifetimes.hops[lifetime].flatMap((hop) => hop.slice(1, 5))].filter((time) => time >= 0);
    reveal(Math.min(...moments), Math.max(...moments));
  } else if (token >= 0) {
    reveal(tokens.at[token], tokens.at[token]);
  }
  // With "=", as no element has such an id: the browser does not scroll to it.
  const hash = token >= 0 ? `#token=${token}` : lifetime >= 0 ? `#segment=${lifetime}` : "#";
  history.replaceState(null, "", hash);
  markTokens();
  showSelection();
  redraw();
}

function chooseToken(token) {
  if (token < 0 || token >= tokens.at.length) return;
  choose(tokens.lifetime[token], token);
}

function stepSegment(step) {
  const count = lifetimes.sent.length;
  if (!count) return;
  // From nothing, the first segment in view.
  const first = lifetimes.sent.findIndex((time) => time >= scale.from);
  const next = chosen.lifetime < 0 ? Math.max(0, first) : chosen.lifetime + step;
  choose(Math.min(count - 1, Math.max(0, next)));
}

// From nothing, the first miss in view or the last.
function stepMiss(step) {
  const current = missed.indexOf(chosen.round);
  const start = step > 0 ? lowerBound(misses, scale.from) : lowerBound(misses, scale.to) - 1;
  const place = current < 0 ? start : current + step;
  if (missed[place] === undefined) return;
  const half = (scale.to - scale.from) / 2;
  show(misses[place] - half, misses[place] + half);
  chooseRound(missed[place]);
}

function chooseRound(round) {
  choose(-1);
  chosen.round = round;
  showRound(round);
}
