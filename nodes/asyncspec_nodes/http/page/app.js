// The page: what is typed, what is said, and how the cluster is.
import { Conversation } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Timeline } from "./timeline.js";

const at = (id) => document.getElementById(id);
const MOST_BARS = 120;
const headers = () => {
  const key = at("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
};
const timeline = new Timeline(at("timeline"));
const cluster = new Cluster(headers, timeline, {
  model: at("model"), ready: at("ready"), keys: at("keys"), rows: at("nodes").tBodies[0],
}, recommended);
const conversation = new Conversation(headers, at("messages"), {
  state: (busy) => { at("send").disabled = busy; at("stop").disabled = !busy; },
  piece: (count) => { bar(count); timeline.tokens(count); },
  end: rates,
});

// What the target recommends, in place of the page's own; not of what was typed.
function recommended({ temperature }) {
  const field = at("temperature");
  if (temperature !== undefined && field.value === field.defaultValue) field.value = temperature;
}

function bar(count) {
  const item = document.createElement("li");
  item.style.setProperty("height", `${Math.min(4, count * .5)}rem`);
  item.textContent = `${count} tokens`;
  item.title = item.textContent;
  at("passes").append(item);
  while (at("passes").children.length > MOST_BARS) at("passes").firstChild.remove();
}

function rates(stats) {
  const share = Math.round(100 * stats.hit_rate);
  at("rates").textContent = `${stats.new_tokens} tokens, ${stats.tokens_per_second.toFixed(1)} a second, `
    + `${stats.tokens_per_round.toFixed(1)} a round, ${share} % hits, ${stats.wasted_rows} rows wasted`;
}

function send() {
  const text = at("prompt").value;
  if (!text.trim() || conversation.busy) return;
  at("prompt").value = "";
  at("passes").replaceChildren();
  at("rates").textContent = "";
  const seed = at("seed").value;
  conversation.ask(text, {
    model: cluster.model,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  });
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") conversation.stop(); });
at("stop").addEventListener("click", () => { conversation.stop(); at("prompt").focus(); });
at("clear").addEventListener("click", () => { conversation.clear(); at("prompt").focus(); });
at("key").addEventListener("change", () => cluster.look());
at("prompt").focus();
cluster.start();
