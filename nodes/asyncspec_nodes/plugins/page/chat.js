// One conversation on the page: its messages, and the answer that streams.
import { Passes } from "./passes.js";
import { Text, copyButton, element } from "./render.js";
import { answer } from "./stream.js";

const THINKING = /^\s*<think>\n?([\s\S]*?)(?:<\/think>\s*|$)/;

function button(label, action, about = label) {
  const made = element("button", "plain", label);
  made.type = "button";
  made.setAttribute("aria-label", about);
  made.addEventListener("click", action);
  return made;
}

export class Chat {
  // `settings` and `store` of their modules; `model()`: the served model's name; `events`: busy(flag),
  // announce(text), failed(error), grew(message), changed().
  constructor(place, settings, store, model, events) {
    Object.assign(this, { place, settings, store, model, events });
    this.scroller = place.parentElement;
    this.running = null;
    this.chat = store.make();
  }

  get busy() { return this.running !== null; }

  get empty() { return this.chat.messages.length === 0; }

  open(chat) {
    this.stop();
    this.chat = chat;
    this.draw();
  }

  // `top`: where the messages are scrolled to; else to their end.
  draw(top) {
    const lost = this.place.contains(document.activeElement);
    this.place.replaceChildren(...this.chat.messages.map((message, i) => this.node(message, i)));
    this.events.changed();
    if (top === undefined) this.down(); else this.scroller.scrollTop = top;
    if (lost) this.scroller.focus({ preventScroll: true });
  }

  // Whether the end of the messages is seen, which then stays so.
  get followed() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
  }

  stop() { this.running?.abort(); }

  ask(text) {
    const { messages } = this.chat;
    if (!messages.length) this.chat.title = text.trim().split("\n")[0].slice(0, 60);
    messages.push({ role: "user", content: text });
    this.store.save(this.chat);
    return this.answer();
  }

  // Answers the last question, once more where it was answered already.
  async answer() {
    const { chat } = this;
    const before = chat.messages.at(-1)?.role === "assistant" ? chat.messages.pop() : null;
    const request = this.settings.request(this.model(), chat.messages);
    const message = { role: "assistant", content: "", passes: [] };
    chat.messages.push(message);
    const running = this.running = new AbortController();
    this.draw();
    this.events.busy(true);
    try {
      await this.stream(message, request, running.signal);
    } catch (error) {
      message.note = running.signal.aborted ? "Stopped." : error.message;
      message.failed = !running.signal.aborted;
      this.events.failed(error);
      // An answer that was to be replaced stays where there is no other.
      if (before && !message.content) chat.messages.splice(-1, 1, { ...before, note: message.note, failed: message.failed });
    }
    if (!message.passes.length) delete message.passes;
    // Unless it was deleted meanwhile.
    if (this.store.chats.has(chat.id)) this.store.save(chat);
    if (this.running === running) {
      this.running = null;
      this.events.busy(false);
    }
    if (this.chat === chat) {
      this.draw(this.followed ? undefined : this.scroller.scrollTop);
      this.events.announce(message.failed ? message.note : `Answer: ${message.content}`);
    }
  }

  async stream(message, request, signal) {
    const begun = performance.now();
    for await (const event of answer(request, this.settings.key, signal)) {
      for (const choice of event.choices) {
        const tokens = choice.token_ids?.length ?? 0;
        message.content += choice.delta?.content ?? "";
        if (choice.delta?.reasoning_content) message.thought = (message.thought ?? "") + choice.delta.reasoning_content;
        if (tokens) {
          message.passes.push([message.content.length, tokens, Math.round(performance.now() - begun)]);
          this.events.tokens(tokens);
        }
        if (choice.stats) {
          const { tokens_per_second, hit_rate, times_plain_rate, plain_measured } = choice.stats;
          message.stats = { tokens_per_second, hit_rate, times_plain_rate, plain_measured };
        }
        if (choice.finish_reason === "length") message.note = "Cut here: the longest answer allowed, or the end of the model's context.";
      }
      this.soon(message);
    }
  }

  // At most once a picture.
  soon(message) {
    if (this.due) return;
    this.due = true;
    const draw = () => {
      this.due = false;
      if (this.shown?.message !== message) return;
      const { followed } = this;
      this.shown.draw();
      this.events.grew(message);
      if (followed) this.down();
    };
    if (document.hidden) setTimeout(draw, 250); else requestAnimationFrame(draw);
  }

  down() { this.scroller.scrollTop = this.scroller.scrollHeight; }

  node(message, i) {
    const last = i === this.chat.messages.length - 1, mine = message.role === "user";
    const node = element("article", `message ${message.role}`);
    node.setAttribute("aria-label", mine ? "You" : "Answer");
    const body = element("div", "body"), tools = element("div", "tools");
    node.append(body);
    if (mine) {
      body.textContent = message.content;
      tools.append(button("Edit", () => this.edit(node, i), "Edit and ask again"));
    } else this.fill(node, body, message, last);
    if (message.note) {
      const note = element("p", message.failed ? "note failed" : "note", message.note);
      if (message.failed) note.setAttribute("role", "alert");
      node.append(note);
    }
    const writing = last && !mine && this.busy;
    if (message.content && !writing) tools.prepend(copyButton(() => message.content, mine ? "Copy your message" : "Copy the answer"));
    if (last && !mine && !writing) tools.append(button("Regenerate", () => this.again(), "Answer once more"));
    if (tools.children.length && !writing) node.append(tools);
    return node;
  }

  again() { return this.busy ? undefined : this.answer(); }

  fill(node, body, message, last) {
    const thought = element("details", "thought", element("summary", "", "Thinking")), thinking = element("div", "text");
    const text = element("div", "text"), words = new Text(text), inner = new Text(thinking), passes = new Passes(body);
    thought.append(thinking);
    body.append(thought, text);
    node.append(passes.node);
    const draw = () => {
      const { content } = message, known = message.passes ?? [];
      const found = THINKING.exec(content), skipped = found ? found[0].length : 0;
      const thoughts = message.thought ?? found?.[1] ?? "";
      thought.hidden = !thoughts.trim();
      inner.show(thoughts);
      const shifted = skipped ? known.map(([end, ...rest]) => [end - skipped, ...rest]) : known;
      words.show(content.slice(skipped), shifted);
      text.classList.toggle("waiting", last && this.busy && !content && !thoughts);
      passes.show(content, known, message.stats);
    };
    draw();
    if (last) this.shown = { message, draw };
  }

  edit(node, i) {
    if (this.busy) return;
    const { messages } = this.chat, field = element("textarea");
    field.value = messages[i].content;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    field.setAttribute("aria-label", "Your message");
    const done = (text) => {
      if (text === null) return void this.draw();
      messages.length = i;
      void this.ask(text);
    };
    const save = () => { if (field.value.trim() && !this.settings.problem()) done(field.value); };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); done(null); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
    });
    const cancel = button("Cancel", () => done(null)), send = button("Ask again", save);
    node.replaceChildren(field, element("div", "tools open", send, cancel));
    field.focus();
  }
}
