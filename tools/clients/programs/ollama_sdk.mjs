import { load, messages, mode, model, replace, show, tools, url } from "./common.mjs";

const { Ollama } = await load("ollama");
const client = new Ollama({ host: url });
if (mode === "chat") {
  console.log((await client.chat({ model, messages })).message.content);
} else if (mode === "stream") {
  await show(await client.chat({ model, messages, stream: true }), (piece) => piece.message.content);
} else {
  let { message } = await client.chat({ model, messages, tools });
  while (message.tool_calls) {
    messages.push(message);
    for (const call of message.tool_calls) {
      const content = replace(call.function.arguments);
      messages.push({ role: "tool", tool_name: call.function.name, content });
    }
    ({ message } = await client.chat({ model, messages, tools }));
  }
  console.log(message.content);
}
