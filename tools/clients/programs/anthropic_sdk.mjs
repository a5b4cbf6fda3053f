import { load, messages, mode, model, parameters, replace, show, tool, url } from "./common.mjs";

const { Anthropic } = await load("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: url, apiKey: "unused" });
const ask = { model, max_tokens: 999, messages };
if (mode === "chat") {
  console.log((await client.messages.create(ask)).content[0].text);
} else if (mode === "stream") {
  await show(client.messages.stream(ask), (event) => event.delta?.text);
} else {
  ask.tools = [{ ...tool, input_schema: parameters }];
  let answer = await client.messages.stream(ask).finalMessage();
  while (answer.stop_reason === "tool_use") {
    messages.push({ role: "assistant", content: answer.content });
    const calls = answer.content.filter((part) => part.type === "tool_use");
    const content = calls.map((call) => ({
      type: "tool_result",
      tool_use_id: call.id,
      content: replace(call.input),
    }));
    messages.push({ role: "user", content });
    answer = await client.messages.stream(ask).finalMessage();
  }
  console.log(answer.content[0].text);
}
