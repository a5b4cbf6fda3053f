// What stands around the picture: title, shares of the devices, where the time went, the clocks.
const percent = (share) => (share ? `${Math.round(share * 100)} %` : "–");

function showSummary() {
  const { summary } = model;
  document.getElementById("title").textContent = model.title || "asyncspec trace";
  document.getElementById("subtitle").textContent =
    `${plural(lanes.length - 1, "stage")}, ${plural(tokens.at.length, "token")}, ${plural(rounds.at.length, "round")}, ` +
    `${milliseconds(model.duration)} · recorded ${model.created.slice(0, 19).replace("T", " ")} by ${model.program}`;
  for (const warning of model.warnings) element("li", warning, document.getElementById("warnings"));
  for (const note of model.notes) element("li", note, document.getElementById("noted"));
  document.getElementById("warnings").hidden = model.warnings.length === 0;
  document.getElementById("notes").hidden = model.notes.length === 0;
  const devices = summary?.devices ?? [];
  const accounts = summary?.decoding?.length ? summary.decoding : summary?.requests ?? [];
  document.getElementById("bottleneck").textContent = summary ? `${summary.speculation} ${summary.bottleneck}`.trim() : "";
  document.getElementById("summary").hidden = !devices.length;
  document.getElementById("time").hidden = !accounts.length;
  if (devices.length) showShares(devices);
  if (accounts.length) showPath(accounts);
}

function showShares(devices) {
  const known = devices.every((device) => !device.unknown);
  const names = ["busy", "useful", "wrong", "dead", ...(known ? [] : ["unknown"]), "drafting", "cache",
    "credit", "sending", "idle"];
  const heads = ["device", "", ...names.map((name) => (name === "drafting" ? "draft" : name))];
  const body = tableOf(document.getElementById("shares"), heads);
  for (const device of devices) {
    const row = rowOf(body, [device.device]);
    const meter = element("span", undefined, element("td", undefined, row));
    meter.className = "meter";
    meter.setAttribute("aria-hidden", "true");
    // Colours come from the style sheet, so they follow light and dark.
    for (const name of ["useful", "wrong", "dead", "unknown", "drafting", "cache", "credit", "sending"]) {
      const bar = element("i", undefined, meter);
      bar.className = name;
      bar.style.width = `${(device[name] ?? 0) * 100}%`;
    }
    for (const name of names) element("td", percent(device[name]), row);
  }
}

function showPath(accounts) {
  const sums = new Map();
  let total = 0;
  for (const account of accounts) {
    total += account.seconds;
    for (const [kind, seconds] of Object.entries(account.kinds)) sums.set(kind, (sums.get(kind) ?? 0) + seconds);
  }
  const body = tableOf(document.getElementById("path"), ["work", "ms", "share"]);
  for (const [kind, seconds] of [...sums].sort((a, b) => b[1] - a[1]).slice(0, 12)) {
    rowOf(body, [kind, (seconds * 1e3).toFixed(1), percent(seconds / (total || 1))]);
  }
}
