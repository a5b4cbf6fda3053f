// The cluster beside the conversation: its nodes in the order in which words pass them, asked for
// while the page is seen.
import { element } from "./render.js";
import { read } from "./stream.js";

const PAUSE = 1000;
const RATE_SECONDS = 60;

const size = (bytes) => (bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

export class Cluster {
  // `key()`: the API key; `shown`: the elements list, about, status, button; `events`: locked(),
  // known(state), state(problem).
  constructor(key, shown, events) {
    Object.assign(this, { key, shown, events });
    this.before = new Map();
    this.cards = new Map();
    this.model = "";
    this.problem = "The cluster has not answered yet.";
  }

  async start() {
    for (;;) {
      if (!document.hidden) await this.look();
      await new Promise((resume) => setTimeout(resume, PAUSE));
    }
  }

  async look() {
    try {
      const state = await read("state", this.key());
      this.show(state);
      this.ready(state.missing);
    } catch (error) {
      if (error.status === 401) this.events.locked();
      this.ready(error.status === 401 ? "This service needs an API key: enter it under Settings." : error.message);
    }
  }

  ready(problem) {
    const { status, button } = this.shown;
    const text = problem || "ready";
    this.problem = problem;
    if (status.textContent !== text) status.textContent = text;
    button.classList.toggle("bad", problem !== "");
    this.events.state(problem);
  }

  show(state) {
    this.model = state.served_as;
    const order = { draft: 0, verify: 1, source: 2 };
    const nodes = state.nodes.toSorted((a, b) => order[a.role] - order[b.role] || a.rank - b.rank);
    const stages = nodes.filter((node) => node.role === "verify");
    const hosts = new Set(nodes.map((node) => node.host).filter(Boolean));
    const where = hosts.size ? ` on ${count(hosts.size, "machine")}` : "";
    const busy = state.places.taken ? `${count(state.places.taken, "answer")} being written.` : "No answer is being written.";
    this.shown.about.textContent = `${state.served_as} in ${count(stages.length, "stage")}${where}. ${busy}`;
    this.shown.list.replaceChildren(...nodes.map((node) => this.card(node, stages)));
    this.events.known(state, stages.length, hosts.size);
  }

  card(node, stages) {
    const card = this.cards.get(node.rank) ?? this.make(node);
    const share = this.share(node), trip = Math.max(-1, ...node.links.map((link) => link.round_trip ?? -1));
    // A stage moves when its machine is lost.
    card.host.textContent = node.host ?? "";
    card.does.textContent = does(node, stages);
    card.meter.value = share;
    card.meter.textContent = `${Math.round(100 * share)} %`;
    const waiting = node.waiting ? `, ${node.waiting} waiting` : "";
    card.facts.textContent = `${Math.round(100 * share)} % busy · ${size(node.memory_bytes)} · `
      + `${count(node.sessions, "answer")}${waiting}`;
    card.facts.title = trip < 0 ? "" : `${(1000 * trip).toFixed(1)} ms to the furthest of its neighbours and back`;
    return card.item;
  }

  make(node) {
    const name = { draft: node.rank ? "Another draft node" : "Draft node", source: "Token source" }[node.role] ?? `Stage ${node.rank}`;
    const does = element("p"), facts = element("p", "facts"), meter = element("meter");
    meter.setAttribute("aria-label", `How busy ${name} is`);
    const host = element("span", "host");
    const head = element("div", "name", element("strong", "", name), host);
    const card = { item: element("li", node.role, head, does, meter, facts), host, does, facts, meter };
    this.cards.set(node.rank, card);
    return card;
  }

  // The busy share of the device since the last look.
  share(node) {
    const before = this.before.get(node.rank);
    this.before.set(node.rank, node);
    const passed = before ? node.up_seconds - before.up_seconds : 0;
    return passed > 0 ? Math.max(0, Math.min(1, (node.busy_seconds - before.busy_seconds) / passed)) : 0;
  }
}

function does(node, stages) {
  if (node.role === "draft") return "Guesses the next words and keeps those that the stages confirm.";
  if (node.role === "source") return "Guesses the next words for the draft node.";
  const [from, to] = node.layers, layers = to - from === 1 ? `layer ${from}` : `layers ${from} to ${to - 1}`;
  if (!to) return "Checks the guesses.";
  const last = node.rank === stages.at(-1).rank;
  if (stages.length === 1) return `Checks the guesses with all ${to} layers of the large model.`;
  return `Runs ${layers} of the large model${last ? ", and says which guesses were right" : node.rank === 1 ? " on the guesses" : ""}.`;
}

// What speculation brought the conversation's last answer, at the head of the panel.
export class Gain {
  // `shown`: the elements whole, times, apiece, right.
  constructor(shown) { this.shown = shown; }

  // `message`: the last answer, complete or not; or nothing.
  show(message) {
    const passes = message?.passes ?? [], stats = message?.stats ?? {}, { whole, times, apiece, right } = this.shown;
    whole.hidden = !passes.length;
    if (whole.hidden) return;
    const tokens = passes.reduce((sum, pass) => sum + pass[1], 0);
    apiece.textContent = (tokens / passes.length).toFixed(1);
    const about = stats.plain_measured ? "" : "~";
    times.textContent = stats.times_plain_rate ? `${about}${stats.times_plain_rate.toFixed(1)}` : "–";
    right.textContent = stats.hit_rate ? `${Math.round(100 * stats.hit_rate)} %` : "–";
  }
}

// Tokens of the last minute, as a text.
export class Rate {
  constructor(place) {
    this.place = place;
    this.came = [];
    setInterval(() => this.show(), 1000);
  }

  add(tokens) { this.came.push([performance.now(), tokens]); }

  show() {
    const now = performance.now();
    this.came = this.came.filter(([at]) => now - at < 1000 * RATE_SECONDS);
    const recent = this.came.filter(([at]) => now - at < 3000).reduce((sum, [, tokens]) => sum + tokens, 0);
    this.place.textContent = recent ? `${(recent / 3).toFixed(1)} tokens a second` : "";
  }
}
