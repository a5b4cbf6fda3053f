// The page: what is typed, which conversation is open, and how the cluster is.
import { Chat } from "./chat.js";
import { Cluster, Gain, Rate } from "./cluster.js";
import { element } from "./render.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { read } from "./stream.js";

const at = (id) => document.getElementById(id);
const store = new Store();
const settings = new Settings(store, () => at("talk").classList.toggle("no-passes", !settings.passes));
const rate = new Rate(at("rate"));
const gain = new Gain({ whole: at("gain"), times: at("times"), apiece: at("apiece"), right: at("right") });
const HINT = at("hint").textContent;
let removed = null;

const cluster = new Cluster(() => settings.key, {
  list: at("nodes"), about: at("about"), status: at("status"), button: at("open-cluster"),
}, {
  locked() {
    if (at("keys").hidden) settings.askForKey();
  },
  known(state, stages, machines) {
    settings.recommended(state.defaults);
    document.title = `${state.served_as} - asyncspec`;
    const places = machines > 1 ? `${machines} machines` : "this machine";
    at("where").textContent = `${state.served_as} runs on ${places}, cut into ${stages} ${stages === 1 ? "stage" : "stages"}.`;
    if (![...at("model").options].some((one) => one.value === state.served_as)) void models();
  },
  state: buttons,
});
const chat = new Chat(at("messages"), settings, store, () => at("model").value || cluster.model, {
  busy: buttons,
  tokens: (count) => rate.add(count),
  grew: (message) => gain.show(message),
  announce: (text) => { at("spoken").textContent = text; },
  failed(error) {
    if (error.status === 401) { at("keys").hidden = false; settings.askForKey(); }
  },
  changed() {
    gain.show(chat.chat.messages.findLast((message) => message.role === "assistant"));
    at("welcome").hidden = !chat.empty;
    conversations();
  },
});

async function models() {
  let data = [];
  try {
    ({ data } = await read("v1/models", settings.key));
  } catch { return; /* asked again with the next look */ }
  const names = data.map((model) => model.id), chosen = at("model").value;
  at("model").replaceChildren(...names.map((name) => element("option", "", name)));
  if (names.includes(chosen)) at("model").value = chosen;
  at("model").disabled = names.length < 2;
}

function buttons() {
  const busy = chat.busy;
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  at("send").disabled = cluster.problem !== "";
  at("hint").textContent = cluster.problem || HINT;
  at("hint").classList.toggle("bad", cluster.problem !== "");
  at("messages").setAttribute("aria-busy", String(busy));
}

function conversations() {
  const items = store.list().map((one) => {
    const open = element("button", "open", one.title || "Untitled");
    open.type = "button";
    open.addEventListener("click", () => { chat.open(one); fold("list"); at("prompt").focus(); });
    if (one.id === chat.chat.id) open.setAttribute("aria-current", "true");
    const remove = element("button", "plain", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete the conversation ${one.title}`);
    remove.addEventListener("click", () => forget(one));
    return element("li", "", open, remove);
  });
  at("conversations").replaceChildren(...items);
  at("none").hidden = items.length > 0;
}

function forget(one) {
  removed = one;
  store.remove(one.id);
  if (one === chat.chat) chat.open(store.make()); else conversations();
  at("undo").hidden = false;
  at("undo").querySelector("button").focus();
}

function restore() {
  if (removed) store.save(removed);
  at("undo").hidden = true;
  conversations();
}

function send() {
  const text = at("prompt").value;
  if (!text.trim() || chat.busy || cluster.problem) return;
  const problem = settings.problem();
  if (problem) { at("spoken").textContent = problem; return; }
  at("undo").hidden = true;
  at("settings").open = false;
  at("prompt").value = "";
  grow();
  void chat.ask(text);
}

function grow() {
  at("prompt").style.setProperty("height", "auto");
  at("prompt").style.setProperty("height", `${Math.min(240, at("prompt").scrollHeight + 2)}px`);
}

const narrow = { list: matchMedia("(max-width: 62rem)"), cluster: matchMedia("(max-width: 70rem)") };

function fold(side, open = !narrow[side].matches) {
  at(side).hidden = !open;
  at(`open-${side}`).setAttribute("aria-expanded", String(open));
}

for (const side of ["list", "cluster"]) {
  fold(side);
  narrow[side].addEventListener("change", () => fold(side));
  at(`open-${side}`).addEventListener("click", () => {
    fold(side, at(side).hidden);
    if (!at(side).hidden) at(side).focus();
  });
}
at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  // With a keyboard on the screen Enter is a new line.
  const typed = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (typed && !matchMedia("(pointer: coarse)").matches) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const side = ["list", "cluster"].find((one) => narrow[one].matches && !at(one).hidden);
  if (side) { fold(side, false); at(`open-${side}`).focus(); }
  else if (at("settings").open) { at("settings").open = false; at("prompt").focus(); }
  else if (chat.busy) chat.stop();
});
at("stop").addEventListener("click", () => { chat.stop(); at("prompt").focus(); });
at("new").addEventListener("click", () => { chat.open(store.make()); fold("list"); at("prompt").focus(); });
at("undo").querySelector("button").addEventListener("click", () => { restore(); at("prompt").focus(); });
at("key").addEventListener("change", () => { void cluster.look(); });
for (const example of at("examples").querySelectorAll("button")) {
  example.addEventListener("click", () => {
    at("prompt").value = example.textContent;
    at("prompt").focus();
    send();
  });
}
addEventListener("storage", (event) => {
  const id = store.changed(event.key);
  if (id && id === chat.chat.id && !chat.busy && store.chats.has(id)) chat.open(store.chats.get(id));
  else if (id) conversations();
});
at("talk").classList.toggle("no-passes", !settings.passes);
chat.draw();
buttons();
at("prompt").focus();
void cluster.start();
