// Requests to the service: JSON, and an answer as it streams.

export const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the service answers with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: something before the service has answered */ }
  throw new Refused(response.status, message);
}

export async function read(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

// The chunks of a chat completion, in order.
export async function* answer(wanted, key, signal) {
  const response = await checked(await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...wanted, stream: true, return_details: true }),
    signal,
  }));
  for await (const event of events(response.body)) {
    if (event.error) throw new Refused(200, event.error.message);
    yield event;
  }
}

// Server-sent events, as their JSON, until the end of the stream.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection was lost before the answer was complete");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}
