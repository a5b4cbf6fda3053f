// A row of spans that answers at any zoom: which spans touch a window, by binary search; how its
// time was spent, from running sums. So a frame costs what its pixels cost, whatever the run holds.

// `parts(span)`: the shares of the span's time, `count` numbers that sum to 1.
function sealRow(list, count, parts) {
  const size = list.length;
  // Where spans overlap, the later one counts from the end of the earlier. `reach` is the latest
  // end so far; both ascend, so both can be searched.
  const begins = new Float64Array(size), reach = new Float64Array(size);
  const sums = new Float64Array((size + 1) * count);
  let end = -Infinity;
  for (let i = 0; i < size; i++) {
    const span = list[i], shares = parts(span);
    begins[i] = Math.max(spans.at[span], end);
    end = reach[i] = Math.max(spans.until[span], end);
    const spent = reach[i] - begins[i];
    for (let part = 0; part < count; part++) {
      sums[(i + 1) * count + part] = sums[i * count + part] + spent * shares[part];
    }
  }
  return { list, count, begins, reach, sums };
}

// First place at or after `low` whose value is at least `wanted`, in ascending values.
function lowerBound(values, wanted, low = 0) {
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// How many spans of a row a window may touch.
const crowd = (row, from, to) => lowerBound(row.begins, to) - lowerBound(row.reach, from);

// Calls `visit(span)` for the spans of a row that touch [from, to].
function touching(row, from, to, visit) {
  const { list, reach } = row;
  for (let i = lowerBound(reach, from); i < list.length; i++) {
    const span = list[i];
    if (spans.at[span] > to) break;
    if (spans.until[span] >= from) visit(span);
  }
}

// A window cut in `columns` of equal time: the share of each part in each, and how many spans had
// begun before each column (one number more, for the end).
function columnsOf(row, from, to, columns) {
  const { count, begins, reach, sums } = row, step = (to - from) / columns;
  const shares = new Float32Array(columns * count), begun = new Uint32Array(columns + 1);
  let place = 0, before = new Float64Array(count), now = new Float64Array(count);
  for (let column = 0; column <= columns; column++) {
    const time = from + column * step;
    place = begun[column] = lowerBound(begins, time, place);
    // Of the last span that had begun, only what lies before this moment.
    const last = place - 1, length = last < 0 ? 0 : reach[last] - begins[last];
    const left = length > 0 ? Math.max(0, reach[last] - time) / length : 0;
    for (let part = 0; part < count; part++) {
      const sum = sums[place * count + part];
      now[part] = left ? sum - left * (sum - sums[last * count + part]) : sum;
      if (column) shares[(column - 1) * count + part] = (now[part] - before[part]) / step;
    }
    [before, now] = [now, before];
  }
  return { shares, begun };
}
