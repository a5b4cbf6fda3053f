// How the cluster is: asked for twice a second, while the page is seen.

const PAUSE = 500;

const megabytes = (bytes) => `${Math.round(bytes / 1e6)} MB`;
const name = (node) => ({ draft: "draft", source: "source" })[node.role] ?? `V${node.rank}`;

export class Cluster {
  // shown: the elements model, ready, keys, rows; recommended(defaults) is told once.
  constructor(headers, timeline, shown, recommended) {
    this.headers = headers;
    this.timeline = timeline;
    this.shown = shown;
    this.recommended = recommended;
    this.model = "";
    this.before = new Map();
  }

  async start() {
    for (;;) {
      if (!document.hidden) await this.look();
      await new Promise((resume) => setTimeout(resume, PAUSE));
    }
  }

  async look() {
    let problem = "";
    try {
      const response = await fetch("state", { headers: this.headers() });
      const state = await response.json();
      if (response.status === 401) this.shown.keys.hidden = false;
      if (!response.ok) throw new Error(state.error.message);
      this.show(state);
      problem = state.missing;
    } catch (error) {
      problem = error.message;
    }
    const ready = this.shown.ready;
    const text = problem || "ready";
    if (ready.textContent !== text) ready.textContent = text;
    ready.classList.toggle("bad", problem !== "");
  }

  show(state) {
    if (!this.model) this.recommended(state.defaults);
    this.model = state.served_as;
    this.shown.model.textContent = `${state.served_as}, ${state.context_length} tokens of context, `
      + `${state.places.taken} of ${state.places.most} places taken`;
    const shares = state.nodes.map((node) => this.share(node));
    this.shown.rows.replaceChildren(...state.nodes.map((node, i) => this.row(node, shares[i])));
    this.timeline.shares(state.nodes.map(name), shares);
  }

  // Of the time since the last look the device was busy this share.
  share(node) {
    const before = this.before.get(node.rank);
    this.before.set(node.rank, node);
    const passed = before ? node.up_seconds - before.up_seconds : 0;
    if (passed <= 0) return 0;
    return Math.max(0, Math.min(1, (node.busy_seconds - before.busy_seconds) / passed));
  }

  row(node, share) {
    const row = document.createElement("tr");
    const cells = [
      name(node),
      node.layers[1] ? `${node.layers[0]} to ${node.layers[1] - 1}` : "",
      megabytes(node.memory_bytes),
      "",
      `${node.sessions}${node.waiting ? ` + ${node.waiting}` : ""}`,
      this.trips(node),
    ];
    for (const text of cells) row.insertCell().textContent = text;
    const meter = document.createElement("meter");
    meter.value = share;
    meter.title = `${Math.round(100 * share)} % busy`;
    meter.textContent = meter.title;
    row.cells[3].append(meter);
    row.cells[5].title = node.links.map((l) => `to ${l.peer}: ${megabytes(l.bytes_sent)} sent`).join("\n");
    return row;
  }

  trips(node) {
    const known = node.links.filter((link) => link.round_trip !== null).map((link) => link.round_trip);
    return known.length ? `${(1000 * Math.max(...known)).toFixed(1)} ms` : "";
  }
}
