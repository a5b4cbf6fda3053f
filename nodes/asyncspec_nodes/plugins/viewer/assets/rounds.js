// Rounds, above the lanes, and the misses that end them, through all lanes.
function paintRounds(g) {
  roundRows.forEach((row, number) => {
    const top = 2 + ROUND * number, draw = (place) => {
      const round = row.list[place], to = toX(rounds.until[round]);
      paintRound(g, round, toX(rounds.at[round]), to, top);
      return to;
    };
    for (let i = lowerBound(row.reach, scale.from); i < row.list.length && row.starts[i] <= scale.to; ) {
      work.marks += 1;
      // Those that end in one pixel are one.
      i = lowerBound(row.reach, toTime(draw(i) + 1), i + 1);
    }
    const chosenPlace = chosen.round < 0 ? -1 : row.list.indexOf(chosen.round);
    if (chosenPlace >= 0) draw(chosenPlace);
  });
}

function paintRound(g, round, from, to, top) {
  g.fillStyle = round % 2 ? ink.lane : ink.line;
  g.fillRect(from, top, Math.max(1, to - from - 1), ROUND - 1);
  if (rounds.end[round] === "miss") {
    g.fillStyle = ink.dead;
    g.fillRect(to - 2, top, 2, ROUND - 1);
  }
  if (round === chosen.round) {
    g.strokeStyle = ink.focus;
    g.lineWidth = 2;
    g.strokeRect(from + 1, top, Math.max(2, to - from - 3), ROUND - 2);
    g.lineWidth = 1;
  }
  const left = Math.max(from, GUTTER) + 5, room = Math.min(to, scale.width) - left, count = rounds.tokens[round];
  if (room < 18) return;
  const long = `${roundRows.length > 1 ? `#${rounds.request[round]}: ` : ""}${plural(count, "token")}`;
  g.fillStyle = ink.soft;
  if (room > g.measureText(long).width + 6) g.fillText(long, left, top + 11);
  else if (room > g.measureText(`${count}`).width + 6) g.fillText(`${count}`, left, top + 11);
}

function roundAt(x, y) {
  const row = roundRows[Math.floor((y - 2) / ROUND)], time = toTime(x);
  let found = -1;
  if (row) touching(row, time, time, (round) => { found = round; });
  return found;
}

function paintMisses(g) {
  const top = BAND + 30, bottom = canvasHeight() - GAP;
  g.strokeStyle = g.fillStyle = ink.dead;
  g.setLineDash([3, 4]);
  g.globalAlpha = 0.7;
  g.beginPath();
  // Where there are many, their crosses say it: lines that stand closer would hide the rest.
  scattered(misses, 12, (_, x) => { g.moveTo(Math.round(x) + 0.5, top); g.lineTo(Math.round(x) + 0.5, bottom); });
  g.stroke();
  g.globalAlpha = 1;
  g.setLineDash([]);
  scattered(misses, 6, (_, x) => g.fillText("×", Math.round(x) - 3, BAND + 27));
}
