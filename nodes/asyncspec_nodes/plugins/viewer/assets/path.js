// A segment's way through all stages and back, over the lanes.
function paintLifetime(g, lifetime) {
  const points = path(lifetime), [endX, endY] = points[points.length - 1];
  const ended = lifetimes.verified[lifetime] < 0 && lifetimes.outcome[lifetime] !== "prompt";
  g.lineJoin = "round";
  for (const [width, colour] of [[5, ink.panel], [2.2, ink.focus]]) {
    g.lineWidth = width;
    g.strokeStyle = colour;
    g.beginPath();
    points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
    g.stroke();
  }
  g.fillStyle = ink.focus;
  for (const [x, y] of points) { g.beginPath(); g.arc(x, y, 3.2, 0, 7); g.fill(); }
  // Where it died, or was last seen.
  if (ended) {
    for (const [width, colour] of [[6, ink.panel], [2.6, ink.dead]]) {
      g.lineWidth = width;
      g.strokeStyle = colour;
      g.beginPath();
      g.moveTo(endX - 5, endY - 5); g.lineTo(endX + 5, endY + 5);
      g.moveTo(endX - 5, endY + 5); g.lineTo(endX + 5, endY - 5);
      g.stroke();
    }
  }
  g.lineWidth = 1;
}

// Corners of a segment's way: sent, received, started, ended, sent on, ..., verified.
function path(lifetime) {
  const middle = (lane, row) => rowTop(lane, row) + rowHeight(row) / 2;
  const points = [[toX(lifetimes.sent[lifetime]), middle(0, 2)]];
  for (const [lane, received, started, ended, sent] of lifetimes.hops[lifetime]) {
    if (received >= 0) points.push([toX(received), middle(lane, 1)]);
    if (started >= 0) points.push([toX(started), middle(lane, 0)]);
    if (ended >= 0) points.push([toX(ended), middle(lane, 0)]);
    if (sent >= 0) points.push([toX(sent), middle(lane, 2)]);
  }
  if (lifetimes.verified[lifetime] >= 0) points.push([toX(lifetimes.verified[lifetime]), middle(0, 2)]);
  return points;
}
