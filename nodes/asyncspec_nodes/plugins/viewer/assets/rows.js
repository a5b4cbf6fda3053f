// A row of a table that answers at any zoom: which of its entries touch a window, by search; how
// its time was spent, from running sums. So a frame costs what its pixels cost, whatever the run
// holds. `work` counts what the last frame looked at.
const work = { spans: 0, columns: 0, marks: 0 };

// `table` has columns `at` and `until`; `list` are indices into it, by their start. `parts(entry)`:
// the shares of its time, `count` numbers that sum to 1.
function sealRow(table, list, count, parts) {
  const size = list.length;
  // Where entries overlap, the later one counts from the end of the earlier. `reach` is the latest
  // end so far; both ascend, so both can be searched.
  const starts = Float64Array.from(list, (entry) => table.at[entry]);
  const begins = new Float64Array(size), reach = new Float64Array(size);
  const sums = new Float64Array((size + 1) * count);
  let end = -Infinity;
  for (let i = 0; i < size; i++) {
    const entry = list[i], shares = parts(entry);
    begins[i] = Math.max(starts[i], end);
    end = reach[i] = Math.max(table.until[entry], end);
    const spent = reach[i] - begins[i];
    for (let part = 0; part < count; part++) {
      sums[(i + 1) * count + part] = sums[i * count + part] + spent * shares[part];
    }
  }
  return { table, list, count, starts, begins, reach, sums };
}

// First place at or after `low` whose value is at least `wanted`, in ascending values. What is near
// `low` is found at once.
function lowerBound(values, wanted, low = 0) {
  let high = low;
  for (let step = 1; high < values.length && values[high] < wanted; step *= 2) {
    low = high + 1;
    high += step;
  }
  high = Math.min(high, values.length);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// How many entries of a row `touching` would look at.
const crowd = (row, from, to) => lowerBound(row.starts, to) - lowerBound(row.reach, from);

// Calls `visit(entry)` for the entries of a row that touch [from, to].
function touching(row, from, to, visit) {
  const { table, list, starts, reach } = row;
  for (let i = lowerBound(reach, from); i < list.length && starts[i] <= to; i++) {
    work.spans += 1;
    if (table.until[list[i]] >= from) visit(list[i]);
  }
}

// A window cut in `columns` of equal time: the share of each part in each, one column after the
// other.
function columnsOf(row, from, to, columns) {
  const { count, begins, reach, sums } = row, step = (to - from) / columns;
  const shares = new Float32Array(columns * count);
  let place = 0, before = new Float64Array(count), now = new Float64Array(count);
  work.columns += columns;
  for (let column = 0; column <= columns; column++) {
    const time = from + column * step;
    place = lowerBound(begins, time, place);
    // Of the last entry that had begun, only what lies before this moment.
    const last = place - 1, length = last < 0 ? 0 : reach[last] - begins[last];
    const left = length > 0 ? Math.max(0, reach[last] - time) / length : 0;
    for (let part = 0; part < count; part++) {
      const sum = sums[place * count + part];
      now[part] = left ? sum - left * (sum - sums[last * count + part]) : sum;
      if (column) shares[(column - 1) * count + part] = (now[part] - before[part]) / step;
    }
    [before, now] = [now, before];
  }
  return shares;
}
