// What is under the mouse, in words.
const TITLES = {
  compute: "computes", draft: "drafts", cache: "tidies its cache", send: "waits for the network",
  transfer: "is sending", queue: "waits for the device", credit: "waits for credit",
  step: "takes a step", silence: "hears nothing",
};
const ENDS = { miss: "ended by a miss", finish: "ended with the answer", lost: "broken off" };

function nodeRange(first, last) {
  return first < 0 ? "none" : first === last ? `${first}` : `${first} to ${last}`;
}

function describeSpan(span) {
  const kind = model.kinds[spans.kind[span]], lines = [];
  const name = spans.segment[span] >= 0 ? `segment ${spans.segment[span]}` : "";
  lines.push(`${lanes[spans.lane[span]].name} ${TITLES[kind]} ${name}`.trim());
  const [at, until] = [spans.at[span], spans.until[span]];
  lines.push(`${milliseconds(until - at)}: from ${milliseconds(at)} to ${milliseconds(until)}`);
  if (kind === "compute") {
    const rows = spans.rows[span], useful = spans.useful[span], dead = spans.dead[span];
    const fate = `${useful} useful, ${rows - useful - dead} wrong, ${dead} dead`;
    lines.push(`${plural(rows, "row")}: ${useful < 0 ? "what became of them was not recorded" : fate}`);
    lines.push(`nodes ${nodeRange(spans.first[span], spans.last[span])}`);
  }
  if (kind === "draft") lines.push(`${plural(spans.rows[span], "node")} asked for`);
  if (spans.nbytes[span] > 0) lines.push(plural(spans.nbytes[span], "byte"));
  if (spans.peer[span]) lines.push(`peer ${spans.peer[span]}`);
  if (spans.session[span] >= 0) lines.push(`session ${spans.session[span]}`);
  return lines.join("\n");
}

function describeRound(round) {
  const [at, until] = [rounds.at[round], rounds.until[round]];
  return `round ${rounds.number[round] + 1} of request ${rounds.request[round]}: ` +
    `${plural(rounds.tokens[round], "token")}, ${ENDS[rounds.end[round]] ?? rounds.end[round]}\n` +
    `${milliseconds(until - at)}: from ${milliseconds(at)} to ${milliseconds(until)}`;
}

function describeMarks(found) {
  const lines = found.slice(0, 6).map((i) => {
    const text = marks.text[i] ? `, ${marks.text[i]}` : "";
    return `${milliseconds(marks.at[i])}: ${marks.kind[i]}${text}`;
  });
  if (found.length > 6) lines.push(`and ${found.length - 6} more`);
  return `${lanes[marks.lane[found[0]]].name}\n${lines.join("\n")}`;
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

function describe(x, y) {
  if (x < GUTTER) return "";
  const round = roundAt(x, y), found = round < 0 ? marksAt(x, y) : [], span = spanAt(x, y);
  if (round >= 0) return describeRound(round);
  if (found.length) return describeMarks(found);
  return span < 0 ? "" : describeSpan(span);
}

const tip = document.getElementById("tip");
function hover(x, y) {
  const text = describe(x, y), span = spanAt(x, y);
  tip.hidden = !text;
  view.style.cursor = span >= 0 && spans.lifetime[span] >= 0 ? "pointer" : "";
  if (!text) return;
  tip.textContent = text;
  const right = x + 14 + tip.offsetWidth > view.clientWidth;
  tip.style.left = `${right ? x - 14 - tip.offsetWidth : x + 14}px`;
  tip.style.top = `${view.offsetTop + Math.max(0, Math.min(y + 14, canvasHeight() - tip.offsetHeight))}px`;
}
