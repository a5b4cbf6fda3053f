// Choosing, and what follows from it.
function choose(journey, token = -1) {
  chosen.journey = journey;
  chosen.round = -1;
  chosen.spans = journey < 0 ? [] : spansOf(journey);
  chosen.token = token >= 0 ? token : (broughtBy.get(journey)?.[0] ?? -1);
  if (journey >= 0) {
    const moments = [journeys.sent[journey], journeys.verified[journey],
      ...journeys.hops[journey].flatMap((hop) => hop.slice(1, 5))].filter((time) => time >= 0);
    reveal(Math.min(...moments), Math.max(...moments));
  } else if (token >= 0) {
    reveal(tokens.at[token], tokens.at[token]);
  }
  // With "=", as no element has such an id: the browser does not scroll to it.
  const hash = token >= 0 ? `#token=${token}` : journey >= 0 ? `#segment=${journey}` : "#";
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
