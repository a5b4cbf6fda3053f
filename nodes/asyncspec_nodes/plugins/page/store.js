// What this browser keeps: conversations and settings. Nothing of it leaves the browser, except what
// is asked. Where storage is refused or full, conversations live as long as the page.

const CHAT = "asyncspec.chat.";
const SETTINGS = "asyncspec.settings";
const MOST = 200;

function put(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function get(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

export class Store {
  constructor() {
    this.chats = new Map();
    this.load();
  }

  load() {
    try {
      for (const name of Object.keys(localStorage)) {
        const chat = name.startsWith(CHAT) ? get(name) : null;
        if (Array.isArray(chat?.messages) && typeof chat.id === "string") this.chats.set(chat.id, chat);
      }
    } catch { /* no storage */ }
  }

  // Another tab has changed something. Returns which conversation, if it was one.
  changed(name) {
    if (!name?.startsWith(CHAT)) return "";
    const id = name.slice(CHAT.length), chat = get(name);
    if (chat) this.chats.set(id, chat); else this.chats.delete(id);
    return id;
  }

  list() {
    return [...this.chats.values()].sort((a, b) => b.changed - a.changed);
  }

  make() {
    const id = [...crypto.getRandomValues(new Uint8Array(8))].map((n) => n.toString(16).padStart(2, "0")).join("");
    return { id, title: "", changed: Date.now(), messages: [] };
  }

  save(chat) {
    chat.changed = Date.now();
    this.chats.set(chat.id, chat);
    for (const old of this.list().slice(MOST)) this.remove(old.id);
    // A full storage first loses what older conversations say of passes, then the oldest ones.
    const others = this.list().filter((one) => one !== chat).reverse();
    const lighter = others.filter((one) => one.messages.some((message) => message.passes)).map((one) => () => {
      one.messages.forEach((message) => { delete message.passes; });
      put(CHAT + one.id, one);
    });
    const steps = [...lighter, ...others.map((one) => () => this.remove(one.id))];
    while (!put(CHAT + chat.id, chat) && steps.length) steps.shift()();
  }

  remove(id) {
    this.chats.delete(id);
    try {
      localStorage.removeItem(CHAT + id);
    } catch { /* no storage */ }
  }

  get settings() { return get(SETTINGS) ?? {}; }

  set settings(values) { put(SETTINGS, values); }
}
