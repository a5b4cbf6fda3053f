// A conversation: its messages, and the answer as it streams.

const PATH = "v1/chat/completions";

// Events of a stream, as their JSON comes to its end.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

export class Conversation {
  // told: state(busy), piece(count of tokens), end(stats).
  constructor(headers, place, told) {
    this.headers = headers;
    this.place = place;
    this.told = told;
    this.messages = [];
    this.running = null;
  }

  get busy() { return this.running !== null; }

  stop() { this.running?.abort(); }

  clear() {
    this.stop();
    this.messages = [];
    this.place.replaceChildren();
  }

  async ask(text, settings) {
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.show("user").textContent = text;
    const running = this.running = new AbortController();
    this.told.state(true);
    const element = this.show("assistant");
    const answer = { role: "assistant", content: "" };
    try {
      await this.stream(element, answer, { ...settings, messages }, running.signal);
      messages.push(answer);
    } catch (error) {
      if (running.signal.aborted) this.note(element, "stopped");
      else this.show("error").textContent = error.message;
      // What was said so far stays part of the conversation; a question without an answer does not.
      if (answer.content) messages.push(answer);
      else messages.pop();
    }
    if (this.running === running) {
      this.running = null;
      this.told.state(false);
    }
  }

  async stream(element, answer, wanted, signal) {
    const response = await fetch(PATH, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({ ...wanted, stream: true, return_details: true }),
      signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) this.take(element, answer, choice);
    }
  }

  take(element, answer, choice) {
    const count = choice.token_ids?.length ?? 0;
    const text = choice.delta.content ?? "";
    if (count) this.told.piece(count);
    if (text) {
      const piece = document.createElement("span");
      piece.className = `piece n${Math.max(1, Math.min(4, count))}`;
      piece.title = count === 1 ? "1 token" : `${count} tokens with one pass`;
      piece.textContent = text;
      const below = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight;
      element.append(piece);
      answer.content += text;
      if (below < 40) this.place.scrollTop = this.place.scrollHeight;
    }
    if (choice.finish_reason === "length") this.note(element, "cut at the token limit");
    if (choice.stats) this.told.end(choice.stats);
  }

  note(element, text) {
    const note = document.createElement("span");
    note.className = "note quiet";
    note.textContent = text;
    element.append(note);
  }

  show(kind) {
    const element = document.createElement("div");
    element.className = `message ${kind}`;
    if (kind === "error") element.setAttribute("role", "alert");
    this.place.append(element);
    this.place.scrollTop = this.place.scrollHeight;
    return element;
  }
}
