// What goes with every request: folded away, kept in this browser. A field that is empty leaves the
// choice to the model.

const NUMBERS = { temperature: "temperature", top_p: "top-p", max_tokens: "most", seed: "seed" };
// Where the model recommends nothing, as llama.cpp samples.
const USUAL = { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05 };
const at = (id) => document.getElementById(id);

export class Settings {
  // `changed()` is called after every change.
  constructor(store, changed) {
    const kept = store.settings;
    this.usual = USUAL;
    at("system").value = kept.system ?? "";
    for (const [name, id] of Object.entries(NUMBERS)) at(id).value = kept[name] ?? "";
    at("show-passes").checked = kept.passes ?? true;
    try {
      at("key").value = sessionStorage.getItem("asyncspec.key") ?? "";
    } catch { /* no storage */ }
    at("settings").addEventListener("input", () => {
      // The key is a secret: it is kept until the tab is closed, at most.
      store.settings = { system: at("system").value, passes: this.passes, ...this.numbers };
      changed();
    });
    at("key").addEventListener("input", () => {
      try {
        sessionStorage.setItem("asyncspec.key", this.key);
      } catch { /* no storage */ }
    });
    at("defaults").addEventListener("click", () => {
      for (const id of Object.values(NUMBERS)) at(id).value = "";
      at("system").value = "";
      at("system").dispatchEvent(new Event("input", { bubbles: true }));
    });
  }

  get key() { return at("key").value.trim(); }

  get passes() { return at("show-passes").checked; }

  get numbers() {
    const given = Object.entries(NUMBERS).filter(([, id]) => at(id).value !== "" && at(id).validity.valid);
    return Object.fromEntries(given.map(([name, id]) => [name, Number(at(id).value)]));
  }

  // The request for an answer to these messages.
  request(model, messages) {
    const system = at("system").value.trim();
    // A question that got no answer is left out.
    const answered = (i) => {
      const next = messages[i + 1];
      return !next || (next.role === "assistant" && next.content);
    };
    const turns = messages
      .filter((message, i) => (message.role === "user" ? answered(i) : message.content))
      .map(({ role, content }) => ({ role, content }));
    return { model, ...this.usual, ...this.numbers, messages: system ? [{ role: "system", content: system }, ...turns] : turns };
  }

  // The first field with a value that cannot be sent, as a sentence; empty without one.
  problem() {
    const id = Object.values(NUMBERS).find((one) => !at(one).validity.valid);
    if (!id) return "";
    at("settings").open = true;
    at(id).focus();
    return `${at(id).labels[0].firstChild.textContent.trim()}: ${at(id).validationMessage}`;
  }

  recommended(defaults) {
    this.usual = Object.fromEntries(Object.entries(USUAL).filter(([name]) => defaults[name] === undefined));
    const { temperature, top_p } = { ...USUAL, ...defaults };
    at("temperature").placeholder = String(temperature);
    at("top-p").placeholder = String(top_p);
  }

  askForKey() {
    at("settings").open = true;
    at("keys").hidden = false;
    at("key").focus();
  }
}
